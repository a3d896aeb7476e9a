"""What the process that speaks HTTP asks of the training service, as plain data. Bodies in JSON are read as these, too."""

from typing import Any, Literal

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.text import shown

LONGEST_ID = 256  # letters of what a promise is asked for by
UNKNOWN = "nothing is known of this request, or its session has ended"


class TinkerRefusal(ConfigError):
    """A request that is not carried out, with the status of HTTP that Tinker's SDK acts upon: 410 and others below 500 are final, but for 408
    and 429, which it sends again. Its text is kept with the request, so it is cut.

    >>> TinkerRefusal("the session has ended", 410).status, len(str(TinkerRefusal("a" * 100_000)))
    (410, 1024)
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(shown(message))
        self.status = status


class Asked(msgspec.Struct, kw_only=True, tag=True, tag_field="verb", omit_defaults=True):
    """What is asked for. Fields that no version of the SDK known here sends are passed by."""


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str = "adamw"


class AdamSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class WithMetadata(Asked, kw_only=True):
    """`metadata` is the JSON of `user_metadata`, of which nothing is made: nobody here reads it."""

    metadata: bytes = b""


class CreateSession(WithMetadata):
    """`session_id`: that of a session which has begun at another server."""

    session_id: str | None = None
    sdk_version: str = ""
    display_name: str | None = None


class Heartbeat(Asked):
    session_id: str


class FinishSession(Asked):
    session_id: str


class CreateModel(WithMetadata):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class LoadWeights(WithMetadata):
    """Onto a run that is there (`model_id`), or a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: OptimizerKind | None = None


class Array(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of one datum: bytes of float32 or int64 in this shape."""

    data: bytes
    shape: tuple[int, ...]
    whole: bool  # whole numbers


class PlainDatum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence: int32 tokens, and what the loss needs by Tinker's names."""

    tokens: bytes
    inputs: dict[str, Array]


class Pass(Asked):
    """forward_backward, and forward."""

    model_id: str
    seq_id: int
    data: list[PlainDatum]
    loss_fn: str
    config: dict[str, float] = {}
    forward_only: bool = False


class RefusedRequest(Asked):
    """A request of a run that says nothing that can be done. It is told so in its turn: its number is used up, since the SDK counts on."""

    model_id: str
    seq_id: int
    refusal: str = ""


class OptimStep(Asked):
    model_id: str
    seq_id: int
    adam_params: AdamSettings | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(WithMetadata):
    """`kind` is training: with the optimizer; external: as PEFT saves it."""

    model_id: str
    path: str
    seq_id: int
    kind: Literal["training", "external"] = "training"
    ttl_seconds: int | None = None
    overwrite: bool = False


class SaveForSampler(WithMetadata):
    """To a path; or as a sampler of its own, or of what the run's inflight samplers have."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None


class GetInfo(Asked):
    model_id: str


class WeightsInfo(Asked):
    tinker_path: str


class CreateSampler(Asked):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class GetSampler(Asked):
    sampler_id: str


class Resolve(Asked):
    """Which adapter answers for a sampler, a path or a run; it is loaded then."""

    sampler_id: str | None = None
    model_path: str | None = None
    base_model: str | None = None


class Retrieve(Asked):
    """The outcome of a promise, when it is there."""

    request_id: str


class ListRuns(Asked):
    limit: int = 20
    offset: int = 0


class GetRun(Asked):
    run_id: str


class ListCheckpoints(Asked):
    """Of a run; or of all."""

    run_id: str | None = None
    limit: int = 100
    offset: int = 0


class ChangeCheckpoint(Asked):
    """What is not None is changed; `ttl_seconds` of 0 is for ever."""

    run_id: str
    checkpoint_id: str  # weights/NAME
    public: bool | None = None
    ttl_seconds: int | None = None


class DeleteCheckpoint(Asked):
    run_id: str
    checkpoint_id: str


class CheckpointFiles(Asked):
    """The files of an external checkpoint, each with a signature by which anybody may fetch it for a while."""

    run_id: str
    checkpoint_id: str


class SignedFile(Asked):
    run_id: str
    checkpoint_id: str
    name: str
    expires: int
    signature: str


class ListSessions(Asked):
    limit: int = 20
    offset: int = 0


class GetSession(Asked):
    session_id: str


class GetFigures(Asked):
    """Of a tenant's runs, for the page."""

    limit: int = 200


class GetTotals(Asked):
    """By tenant, for Prometheus."""


class CountSessions(Asked):
    """Of all tenants."""


AnyAsked = (
    CreateSession | Heartbeat | FinishSession | CreateModel | LoadWeights | Pass | RefusedRequest | OptimStep | SaveWeights | SaveForSampler
    | GetInfo | WeightsInfo | CreateSampler | GetSampler | Resolve | Retrieve | ListRuns | GetRun | ListCheckpoints | ChangeCheckpoint
    | DeleteCheckpoint | CheckpointFiles | SignedFile | ListSessions | GetSession | GetFigures | GetTotals | CountSessions
)  # fmt: skip


class Promise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a verb answers that takes a while."""

    request_id: str
    model_id: str | None = None


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass found: float32 log probabilities of all data, one after another."""

    loss: float
    logprobs: bytes
    shapes: list[tuple[int, ...]]
    metrics: dict[str, float]


class PromiseOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a promise: the result of a pass, that of another verb, or an error and whose it is."""

    passed: Passed | None = None
    body: dict[str, Any] = {}
    error: str = ""
    category: Literal["", "user", "server"] = ""

"""An executor with keys for tests, its folder of tenants, and what their clients need."""

from pathlib import Path

import torch

import symbiosis
from symbiosis.client.session import Session
from symbiosis.keys import generate
from symbiosis.protocol import Op
from tests.conftest import tiny_llama

ROWS = torch.arange(640.0).view(10, 64)


class Realm:
    """Lets in alice; others when told to. Options are the executor's."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder, self.tenants = folder, folder / "tenants"
        self.tenants.mkdir()
        self.key, _ = generate("executor", folder)
        self.let_in("alice")
        chosen = {"policy": "immediate", **options}
        self.executor = symbiosis.Executor(
            tiny_llama(), listen="tcp://127.0.0.1:0", key=str(self.key), tenants=str(self.tenants), **chosen
        )

    def let_in(self, name: str) -> None:
        if not (self.folder / f"{name}.key").exists():
            generate(name, self.folder)
        (self.tenants / f"{name}.pub").write_bytes((self.folder / f"{name}.pub").read_bytes())

    def endpoint(self, key: str, server: str = "executor", address: str | None = None) -> str:
        return f"{address or self.executor.endpoint}?server={self.folder}/{server}.pub&key={self.folder}/{key}.key"

    def session(self, key: str = "alice", **options: float) -> Session:
        return Session(self.endpoint(key), **options)  # type: ignore[arg-type]


def echoes(session: Session) -> bool:
    return torch.equal(session.call(Op.ECHO, 0, ROWS), ROWS)

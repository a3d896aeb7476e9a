"""Which commands come next: in the order of each run, joined, and shared out among tenants."""

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from symbiosis.training.command_queue import CommandQueue


@dataclass(eq=False)
class Asked:
    tokens: int = 10
    is_pass: bool = True

    @property
    def cost(self) -> int:
        return max(1, self.tokens)


@dataclass(eq=False)
class Asker:
    name: str
    tenant: str
    commands: deque[Asked] = field(default_factory=deque)


def flood(queue: CommandQueue, run: Asker, count: int, tokens: int = 10) -> None:
    for _ in range(count):
        queue.add(run, Asked(tokens))


def test_tenants_share_however_many_runs_each_has() -> None:
    queue = CommandQueue(1000)
    many, one = [Asker(f"m{n}", "many") for n in range(9)], Asker("o", "one")
    for run in (*many, one):
        flood(queue, run, 100)
    had = Counter[str]()
    for _ in range(40):
        for run, command in queue.passes(20):
            had[run.tenant] += command.tokens
    assert abs(had["many"] - had["one"]) <= 20


def test_runs_of_a_tenant_share() -> None:
    queue = CommandQueue(1000)
    long, short = Asker("long", ""), Asker("short", "")
    flood(queue, long, 50, tokens=90)
    flood(queue, short, 500, tokens=10)
    had = Counter[str]()
    for _ in range(60):
        for run, command in queue.passes(100):
            had[run.name] += command.tokens
    assert abs(had["long"] - had["short"]) <= 200


def test_who_comes_back_has_saved_up_nothing() -> None:
    queue = CommandQueue(1000)
    old, new = Asker("old", "old"), Asker("new", "new")
    flood(queue, old, 100)
    for _ in range(50):
        queue.passes(10)
    flood(queue, new, 100)
    had = Counter(run.tenant for _ in range(20) for run, _ in queue.passes(10))
    assert had == {"old": 10, "new": 10}


def test_beside_a_run_in_the_midst_of_a_pass_others_compute_what_is_small() -> None:
    queue = CommandQueue(1000)
    busy, small, large = (Asker(name, name) for name in ("busy", "small", "large"))
    for run, tokens in ((busy, 10), (small, 10), (large, 60)):
        flood(queue, run, 2, tokens)
    assert [run for run, _ in queue.passes(50, [busy], largest=50)] == [small, small]
    assert not queue.passes(50, [busy], largest=50) and len(busy.commands) == 2 == len(large.commands)
    queue.add(small, Asked(is_pass=False))
    assert queue.calls([busy]) == [small] and not queue.calls([small])


def test_a_pass_that_does_not_fit_lets_others_by_and_is_next() -> None:
    queue = CommandQueue(1000)
    large, small = Asker("large", "a"), Asker("small", "b")
    flood(queue, small, 1)
    flood(queue, large, 1, tokens=100)
    flood(queue, small, 3)
    assert [run.name for run, _ in queue.passes(50)] == ["small"] * 4
    assert [run.name for run, _ in queue.passes(50)] == ["large"]
    assert not queue


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=40), st.integers(1, 60))
def test_each_is_done_once_and_in_the_order_of_its_run(asked: list[tuple[int, int, bool]], most: int) -> None:
    queue, runs = CommandQueue(1000), [Asker(str(n), str(n % 2)) for n in range(4)]
    put: dict[str, list[Asked]] = {run.name: [] for run in runs}
    for number, tokens, is_pass in asked:
        command = Asked(tokens if is_pass else 0, is_pass)
        put[runs[number].name].append(command)
        queue.add(runs[number], command)
    done: dict[str, list[Asked]] = {run.name: [] for run in runs}
    while queue:
        if calls := queue.calls():
            done[calls[0].name].append(queue.take(calls[0]))
            continue
        taken = queue.passes(most)
        assert taken and (len(taken) == 1 or sum(command.tokens for _, command in taken) <= most)
        for run, command in taken:
            done[run.name].append(command)
    assert done == put

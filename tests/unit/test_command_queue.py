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


def passed(queue: CommandQueue, most: int) -> list[tuple[Asker, Asked]]:
    """Take passes, and have them done."""
    taken = queue.passes(most)
    queue.computed(taken, 1.0)
    queue.done([run for run, _ in taken])
    return taken


def test_tenants_share_however_many_runs_each_has() -> None:
    queue = CommandQueue(1000)
    many, one = [Asker(f"m{n}", "many") for n in range(9)], Asker("o", "one")
    for run in (*many, one):
        flood(queue, run, 100)
    had = Counter[str]()
    for _ in range(40):
        for run, command in passed(queue, 20):
            had[run.tenant] += command.tokens
    assert abs(had["many"] - had["one"]) <= 20


def test_runs_of_a_tenant_share() -> None:
    queue = CommandQueue(1000)
    long, short = Asker("long", ""), Asker("short", "")
    flood(queue, long, 50, tokens=90)
    flood(queue, short, 500, tokens=10)
    had = Counter[str]()
    for _ in range(60):
        for run, command in passed(queue, 100):
            had[run.name] += command.tokens
    assert abs(had["long"] - had["short"]) <= 200


def test_who_comes_back_has_saved_up_nothing() -> None:
    queue = CommandQueue(1000)
    old, new = Asker("old", "old"), Asker("new", "new")
    flood(queue, old, 100)
    for _ in range(50):
        passed(queue, 10)
    flood(queue, new, 100)
    had = Counter(run.tenant for _ in range(20) for run, _ in passed(queue, 10))
    assert had == {"old": 10, "new": 10}


def test_who_comes_while_nobody_waits_has_saved_up_nothing() -> None:
    """The one before has had much, and is not there at the moment."""
    queue = CommandQueue(1000)
    old, new = Asker("old", "old"), Asker("new", "new")
    flood(queue, old, 100)
    for _ in range(100):
        passed(queue, 10)
    flood(queue, new, 100)
    flood(queue, old, 100)
    had = Counter(run.tenant for _ in range(20) for run, _ in passed(queue, 10))
    assert abs(had["old"] - had["new"]) <= 2


def test_a_tenant_that_is_there_gets_its_share_whichever_of_its_runs_come_and_go() -> None:
    """Both of its runs wait for each of their small passes to be done before they ask for the next, beside one that floods with large ones."""
    queue = CommandQueue(1000)
    eve, mine = Asker("e", "eve"), [Asker(name, "bob") for name in "xy"]
    flood(queue, eve, 100, tokens=100)
    for run in mine:
        flood(queue, run, 1)
    had = Counter[str]()
    for _ in range(200):
        for run, command in passed(queue, 10):
            had[run.tenant] += command.tokens
            if run is not eve:
                flood(queue, run, 1)
    assert abs(had["eve"] - had["bob"]) <= 110, had


@dataclass
class Part:
    """A pass of which this many parts are left."""

    taken: list[tuple[Asker, Asked]]
    left: int


def computed(queue: CommandQueue, part: int, open: dict[str, Part]) -> str:
    """Compute what comes next, in parts of so many tokens; return whose it was."""
    if taken := queue.passes(part):
        run = taken[0][0]
        tokens = sum(command.tokens for _, command in taken)
        open[run.name] = Part(taken, max(1, tokens // part))
    else:
        run = queue.goes_on()
    at, all_parts = open[run.name], max(1, sum(command.tokens for _, command in open[run.name].taken) // part)
    queue.computed(at.taken, 1 / all_parts)
    at.left -= 1
    if not at.left:
        queue.done([each for each, _ in open.pop(run.name).taken])
    return run.tenant


def test_large_passes_of_several_tenants_go_on_in_turn() -> None:
    queue, open = CommandQueue(1000), dict[str, Part]()
    eve, bob = Asker("e", "eve"), Asker("b", "bob")
    flood(queue, eve, 5, tokens=1000)
    order = [computed(queue, 10, open) for _ in range(7)]
    flood(queue, bob, 1, tokens=60)
    order += [computed(queue, 10, open) for _ in range(12)]
    assert order[:8] == ["eve"] * 7 + ["bob"] and order[7:].count("bob") == 6
    assert set(queue.open) <= {eve}


def test_a_tenant_has_one_large_pass_at_a_time_and_small_ones_beside_it() -> None:
    queue, open = CommandQueue(1000), dict[str, Part]()
    large = [Asker(f"l{n}", "eve") for n in range(5)]
    for run in large:
        flood(queue, run, 1, tokens=100)
    small = Asker("s", "eve")
    for _ in range(4):
        computed(queue, 10, open)
    flood(queue, small, 1)
    assert len(queue.open) == 1
    computed(queue, 10, open)
    assert len(queue.open) == 1 and not small.commands


def test_small_passes_of_many_are_computed_together_however_short_a_share_is() -> None:
    queue = CommandQueue(1000)
    many = [Asker(f"m{n}", f"tenant {n % 8}") for n in range(64)]
    for run in many:
        flood(queue, run, 1)
    taken = queue.passes(1000, share=80)
    assert len(taken) == 64
    queue.done([run for run, _ in taken])


def test_of_several_tenants_none_has_more_than_its_share_of_a_pass() -> None:
    queue = CommandQueue(1000)
    many, large, other = [Asker(f"m{n}", "many") for n in range(20)], Asker("l", "large"), Asker("o", "other")
    flood(queue, other, 1)
    for run in many:
        flood(queue, run, 1)
    flood(queue, large, 1, tokens=90)
    taken = queue.passes(1000, share=80)
    assert Counter(run.tenant for run, _ in taken) == {"other": 1, "many": 8}
    queue.computed(taken, 1.0)
    queue.done([run for run, _ in taken])
    assert [run for run, _ in queue.passes(1000, share=80)] == [large], "a large one is alone"


def test_a_run_in_the_midst_of_a_pass_has_nothing_else_done() -> None:
    queue = CommandQueue(1000)
    busy, other = Asker("busy", "busy"), Asker("other", "other")
    flood(queue, busy, 2, tokens=100)
    assert [run for run, _ in queue.passes(50)] == [busy]
    queue.add(busy, Asked(is_pass=False))
    queue.add(other, Asked(is_pass=False))
    assert queue.calls() == [other]
    assert not queue.passes(50) and queue.goes_on() is busy and len(busy.commands) == 2


def test_a_pass_that_does_not_fit_lets_others_by_and_is_next() -> None:
    queue = CommandQueue(1000)
    large, small = Asker("large", "a"), Asker("small", "b")
    flood(queue, small, 1)
    flood(queue, large, 1, tokens=100)
    flood(queue, small, 3)
    assert [run.name for run, _ in passed(queue, 50)] == ["small"] * 4
    assert [run.name for run, _ in passed(queue, 50)] == ["large"]
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
        taken = passed(queue, most)
        assert taken and (len(taken) == 1 or sum(command.tokens for _, command in taken) <= most)
        for run, command in taken:
            done[run.name].append(command)
    assert done == put

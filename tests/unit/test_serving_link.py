"""The link between the engine and HTTP: a request that fails on the way to its client takes nobody else along."""

import asyncio
import socket

from symbiosis.serving.http.failures import ApiError
from symbiosis.serving.http.link.http_side import RemoteEngine
from symbiosis.serving.http.link.messages import Outputs, Welcome, framed
from symbiosis.serving.request import Finish, Output, Request, Sampling, Token


async def _given_to_two(first: list[ApiError], second: list[Output | ApiError]) -> bool:
    """Give outputs to two requests, the first of which cannot take its own. Return whether the link is still there."""
    ours, theirs = socket.socketpair()
    ours.sendall(framed(Welcome(model="demo", longest=8, most_tokens=8, vocabulary=8)))
    remote = await RemoteEngine.connect(theirs)

    def broken(output: Output | ApiError) -> None:
        if isinstance(output, ApiError):
            first.append(output)
        else:
            raise IndexError("string index out of range")

    takers = {remote.next_id(): broken, remote.next_id(): second.append}
    for id, take in takers.items():
        remote.submit(Request(id=id, prompt=(1,), sampling=Sampling(max_tokens=1)), take)
    outputs = [Output(request=id, tokens=(Token(1),), finish=Finish.LENGTH) for id in takers]
    ours.sendall(framed(Outputs(outputs)))
    while not second:
        await asyncio.sleep(0.001)
    is_there = remote.is_there
    remote.close()
    ours.close()
    await remote.ended
    return is_there


def test_an_output_that_cannot_be_taken_ends_its_own_request_only() -> None:
    first, second = list[ApiError](), list[Output | ApiError]()
    assert asyncio.run(asyncio.wait_for(_given_to_two(first, second), 30))
    assert [error.status for error in first] == [500] and "IndexError" in str(first[0])
    assert isinstance(second[0], Output)

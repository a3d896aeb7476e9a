"""Bounds how often connections come from one address: beyond that the kernel drops what opens one, before ZeroMQ spends anything on it."""

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from symbiosis.base.allowance import Allowance
from symbiosis.transport.tcp.sockets import Wire, descriptor_at, listening

AT_ONCE, PER_S = 1024, 200.0  # connections from one address
FINE = 100  # connections that one with a message of very many frames counts as: it keeps others waiting for as long
SHUT_S = 1.0  # an address that is shut out stays so for this long; whoever opens a connection tries again as often
MOST_SHUT = 64  # addresses at a time
ANYBODY = ""  # stands for addresses that are not known, because their connections ended at once
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
NET = 0xFFF00000  # where a filter finds the IP header; 0 is the TCP header
SYN, FLAGS_AT, V4_FROM_AT, V6_FROM_AT = 0x02, 13, 12, 8


class Instruction(NamedTuple):
    """An instruction of the kernel's packet filter. A jump skips so many instructions."""

    code: int
    value: int = 0
    if_true: int = 0
    if_false: int = 0


LOAD_BYTE, LOAD_WORD, MASK, EQUALS, HAS_BITS, RETURN = 0x30, 0x20, 0x54, 0x15, 0x45, 0x06
PASS, DROP = Instruction(RETURN, 0xFFFFFFFF), Instruction(RETURN, 0)


class Gate:
    """The kernel's filter on one listening socket."""

    def __init__(self, port: int, tell: Callable[[str, str], None], fines: bool = False) -> None:
        """`tell` takes the reason and the address whenever the gate is shut. Without `fines`, the door bars those who misbehave."""
        self._port, self._fd, self._tell = port, descriptor_at(port), tell
        self._allowance, self._fines = Allowance(AT_ONCE, PER_S), fines
        self._shut: dict[str, float] = {}  # networks, and until when

    def fine(self, wire: Wire | None) -> None:
        """Count a connection that takes long to get rid of as very many."""
        if self._fines and wire:
            self.came(str(wire.other_end[0]), FINE)

    def came(self, address: str, times: int = 1) -> None:
        """Count a connection. After too many, shut the gate for its address."""
        network, now = network_of(address), monotonic()
        if not self._allowance.takes(network, now, times) and network not in self._shut and len(self._shut) < MOST_SHUT:
            self._shut[network] = now + SHUT_S
            self._filter()
            self._tell("TOO_MANY_CONNECTIONS", network)

    def look(self, now: float) -> None:
        """Open the gate for addresses that have been shut out for long enough."""
        self._allowance.forget(now)
        before, self._shut = self._shut, {network: until for network, until in self._shut.items() if until > now}
        if len(before) != len(self._shut):
            self._filter()

    def _filter(self) -> None:
        """Tell the kernel. One that has no filters goes on without."""
        steps = program(self._shut)
        code = ctypes.create_string_buffer(
            b"".join(struct.pack("=HBBI", s.code, s.if_true, s.if_false, s.value) for s in steps)
        )
        told = struct.pack("@HP", len(steps), ctypes.addressof(code))
        with suppress(OSError), listening(self._fd, self._port) as kept:
            if self._shut:
                kept.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, told)
            else:
                kept.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def network_of(address: str) -> str:
    """Return what stands for the owner of an address: for IPv6 its network, because one host may have many addresses; and one word
    for all of this host's.

    >>> network_of("192.0.2.7"), network_of("2001:db8::7"), network_of("::ffff:127.0.0.3")
    ('192.0.2.7/32', '2001:db8::/64', '127.0.0.0/8')
    """
    if not address:
        return ANYBODY
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        parsed = parsed.ipv4_mapped
    return str(ipaddress.ip_network((parsed, 8 if parsed.is_loopback else 32), strict=False))


def program(networks: Iterable[str]) -> Sequence[Instruction]:
    """Return a filter that drops what opens a connection from one of `networks`, and lets everything else pass."""
    if ANYBODY in networks:
        return [Instruction(LOAD_BYTE, FLAGS_AT), Instruction(HAS_BITS, SYN, 1), PASS, DROP]
    steps = [Instruction(LOAD_BYTE, FLAGS_AT), Instruction(HAS_BITS, SYN, 1), PASS]
    for network in map(ipaddress.ip_network, networks):
        steps += _drops(network)
    return [*steps, PASS]


def _drops(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> list[Instruction]:
    """Return steps that drop a packet from `network`, and else lead to what follows."""
    first = int(network.network_address)
    wanted = [(V4_FROM_AT, first, int(network.netmask))]
    if network.version == 6:
        wanted = [(V6_FROM_AT, first >> 96, 0xFFFFFFFF), (V6_FROM_AT + 4, first >> 64 & 0xFFFFFFFF, 0xFFFFFFFF)]
    steps = [DROP]
    for at, value, mask in reversed([(0, network.version << 28, 0xF0000000), *wanted]):
        steps = [
            Instruction(LOAD_WORD, NET + at),
            Instruction(MASK, mask),
            Instruction(EQUALS, value, 0, len(steps)),
            *steps,
        ]
    return steps

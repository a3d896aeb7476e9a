"""What a request costs its key at a front end: what its server counts, and an estimate as long as that has not told anything."""

from dataclasses import dataclass

from symbiosis.server.api_keys import Admission


@dataclass
class Bill:
    """The tokens of one request.

    >>> from symbiosis.base.key_lines import KeyLine
    >>> from symbiosis.server.api_keys import Tenant
    >>> tenant = Tenant(KeyLine("anna"))
    >>> bill = Bill(tenant.admit(1, now=0.0, tokens=25 + 8), prompt=25, answer=8)
    >>> bill.count(100)
    >>> tenant.day.reserved
    108
    >>> bill.end(was_let_in=True, passed=3)
    >>> tenant.day.reserved, tenant.day.spent
    (0, 103)
    """

    admission: Admission
    prompt: int  # about; as its server counts, once that has told
    answer: int  # at most
    told: int = 0  # the last time

    def count(self, tokens: int) -> None:
        """A server has told what the request takes by now: the first time, its prompt."""
        if not self.told:
            self.prompt = tokens
            self.admission.reserve(tokens + self.answer)
        self.told = tokens

    def end(self, was_let_in: bool, passed: int = 0) -> None:
        """The request has ended: with so many tokens of its answer that were counted here."""
        self.admission.end(max(self.prompt + passed, self.told) if was_let_in else passed)

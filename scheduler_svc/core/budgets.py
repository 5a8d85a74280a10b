"""Token budgets: what the requests of an account may spend of the tokens that were leased for it.

The driver leases tokens ahead from a bucket that all schedulers share, and adds them here. A step is planned only for
tokens that are leased already, so `spent` plus `promised` never exceeds `leased`.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scheduler_svc.core.account_limits import AccountLimits

QUANTUM = 16  # tokens that must be available for each running sequence of an account before it runs another one
LEASE_SHARE = 10  # the part of a minute's tokens that is leased ahead at most, unless one request needs more
_AHEAD = 64  # tokens leased ahead for each live sequence


class Demand(NamedTuple):
    """How many tokens to lease, and how many at least: fewer would let nothing run."""

    most: int
    least: int


class Budget:
    """The tokens of one account in this term: leased, promised and spent.

    Promised ones are for tokens that steps in flight may return, and for beam searches until they end.
    """

    def __init__(self, account: str, tokens_per_minute: int, owner: "Budgets") -> None:
        self.owner = owner
        self.term = f"{owner.term}.{owner.num_created}"
        """Distinguishes the sums of this budget from those of the account's other ones."""
        self.account = account
        self.tokens_per_minute = tokens_per_minute
        self.stated_at = -math.inf
        """When the request arrived that had this limit."""
        self.leased = 0
        self.promised = 0
        self.spent = 0
        self.num_live = 0  # sequences that have not ended
        self.num_running = 0  # of these, those that hold a slot and pay for each token
        self._shortfall: int | None = None  # the fewest tokens that would let something run that cannot run now
        self._bucket: tuple[float, float] | None = None  # the level of its bucket, and when; None: not known

    @property
    def available(self) -> int:
        """Leased tokens that are neither spent nor promised."""
        return self.leased - self.promised - self.spent

    @property
    def demand(self) -> Demand | None:
        """What to lease now; None while there is enough."""
        ahead = min(max(1, self.tokens_per_minute // LEASE_SHARE), _AHEAD * self.num_live)
        if self._shortfall is not None and self._shortfall > self.available:
            least = 1 if self.num_running else self._shortfall - self.available
            return Demand(max(ahead, self._shortfall) - self.available, least)
        if self.num_running and 2 * self.available < ahead:
            return Demand(ahead - self.available, 1)
        return None

    def grant(self, num_tokens: int) -> None:
        """Adds leased tokens."""
        self.leased += num_tokens
        self._shortfall = self._bucket = None
        self.owner.on_available()

    def note_bucket(self, level: float, now: float) -> None:
        """The account's bucket has at most so many tokens, and fills by its rate."""
        self._bucket = level, now

    def seconds_until(self, num_needed: int, now: float) -> float:
        """Seconds until so many tokens can be available at the earliest, as far as is known. Promised tokens may come
        back at once.
        """
        if self._bucket is None:
            return 0.0
        level, at = self._bucket
        num_missing = num_needed - (self.leased - self.spent) - level
        return max(0.0, at + num_missing * 60 / self.tokens_per_minute - now) if num_missing > 0 else 0.0

    def release_promised(self, num_promised: int, num_spent: int) -> None:
        """Of tokens that were promised, so many are spent; the others are available again."""
        self.promised -= num_promised
        self.spent += num_spent
        if self._shortfall is not None and self._shortfall <= self.available:
            self._shortfall = None
            self.owner.on_available()

    def note_slots(self, change: int) -> None:
        """So many more sequences hold a slot and pay for each token now, or fewer: then others need fewer tokens."""
        self.num_running += change
        if change < 0 and self._shortfall is not None:
            self.owner.on_available()

    def take_back(self) -> int:
        """Removes the leased tokens that are available, to be returned to the bucket; returns how many."""
        num_tokens = self.available
        self.leased -= num_tokens
        self._bucket = None
        return num_tokens

    def note_shortfall(self, num_needed: int) -> None:
        """Something cannot run before so many tokens are available."""
        if self._shortfall is None or num_needed < self._shortfall or self._shortfall <= self.available:
            self._shortfall = num_needed
            self.owner.has_new_demand = True

    def check_integrity(self) -> None:
        """Raises AssertionError unless everything spent and promised is leased."""
        assert self.promised >= 0, "more was settled than promised"
        assert 0 <= self.spent <= self.leased, "more is spent than leased"
        assert self.available >= 0, "more is promised than leased"
        assert 0 <= self.num_running <= self.num_live, "sequences of an account do not add up"


class Charge:
    """What one request costs its account.

    - Its prompt is paid once, when the first of its sequences is admitted, whatever is computed again later. Tokens
      from the prefix cache cost `cached_token_factor` each, and their sum is rounded up.
    - Each sampled token costs one. It is promised when a step is planned, and paid when the step returns it.
    - A beam search pays its width for each position. The most that this may be is promised with the prompt: a beam that
      pauses would stop the others.
    - A value costs its prompt only.
    """

    __slots__ = (
        "_cached_factor",
        "_num_prompt",
        "_prompt_estimate",
        "_search_tokens",
        "budget",
        "is_paid",
        "pays_ahead",
        "prompt_cost",
    )

    def __init__(self, budget: Budget, cached_factor: float, num_prompt: int, search_tokens: int | None) -> None:
        """`search_tokens` are what a beam search costs at most, 0 for a value; None: it pays for each token."""
        self.budget = budget
        self.is_paid = False
        """Whether the prompt is paid."""
        self.prompt_cost = 0
        """What was paid for the prompt in this term."""
        self.pays_ahead = search_tokens is not None
        """Whether everything is paid with the prompt."""
        self._cached_factor = cached_factor
        self._num_prompt = num_prompt
        self._search_tokens = search_tokens or 0  # to be promised with the prompt; once it is paid: still promised
        self._prompt_estimate = self._cost(num_prompt)  # the least, until it is known what is cached

    @property
    def has_tokens(self) -> bool:
        """Whether a step may compute the next token of one of its sequences."""
        return self.pays_ahead or self.budget.available > 0

    @property
    def num_promised_ahead(self) -> int:
        """Tokens of a search that are promised until it has computed them, or has ended."""
        return self._search_tokens if self.is_paid else 0

    def num_needed(self, num_left: int) -> int:
        """How many tokens must be available before a sequence gets a slot that may return `num_left` more.

        QUANTUM for each sequence of the account that would run then, so that sequences do not come and go with each
        token: an account whose tokens are short runs few sequences at a time. No more than a minute's tokens, unless
        the prompt alone costs as much.
        """
        return self._num_needed(num_left, self.budget.num_running)

    def seconds_until_start(self, num_left: int, now: float) -> float:
        """Seconds until its account can pay for a slot at the earliest, as far as is known."""
        return self.budget.seconds_until(self._num_needed(num_left, 0), now)

    def _num_needed(self, num_left: int, num_running: int) -> int:
        num_needed = 0 if self.is_paid else self._prompt_estimate
        if self.pays_ahead:
            return num_needed + (0 if self.is_paid else self._search_tokens)
        most = max(self.budget.tokens_per_minute, num_needed + 1)
        return min(most, num_needed + min(QUANTUM, num_left) * (num_running + 1))

    def pay_prompt(self, num_cached: int, num_left: int) -> bool:
        """Pays for the prompt, of which `num_cached` tokens are cached, unless that is done; False: too few tokens."""
        if self.is_paid:
            return True
        self._prompt_estimate = self._cost(num_cached)
        if self.num_needed(num_left) > self.budget.available:
            return False
        self.is_paid = True
        self.prompt_cost = self._prompt_estimate
        self.budget.spent += self.prompt_cost
        self.budget.promised += self._search_tokens
        return True

    def note_slots(self, change: int) -> None:
        """So many more of its sequences hold a slot now, or fewer."""
        if not self.pays_ahead:
            self.budget.note_slots(change)

    def reserve(self, num_tokens: int) -> None:
        """Promises tokens that a step may return, unless everything is paid with the prompt."""
        if not self.pays_ahead:
            assert num_tokens <= self.budget.available, "tokens are planned that are not leased"
            self.budget.promised += num_tokens

    def settle(self, num_reserved: int, num_returned: int) -> None:
        """A step for which `num_reserved` tokens were promised is done, and returned so many; 0 where it was lost."""
        self.budget.release_promised(num_reserved, num_returned)

    def pay_search(self, num_tokens: int) -> None:
        """A search has computed one more position."""
        self._search_tokens -= num_tokens
        self.budget.release_promised(num_tokens, num_tokens)

    def close(self) -> None:
        """The request has ended: what is left of a search's tokens is available again."""
        if self.num_promised_ahead:
            self.budget.release_promised(self.num_promised_ahead, 0)
            self._search_tokens = 0

    def _cost(self, num_cached: int) -> int:
        num_cached = min(num_cached, self._num_prompt)  # fewer where an earlier leader was paid
        return self._num_prompt - num_cached + math.ceil(num_cached * self._cached_factor)


class Budgets:
    """The budgets of all accounts with a limit of tokens. All cores of a scheduler share them."""

    def __init__(self, term: str = "", on_available: Callable[[], None] = lambda: None) -> None:
        """`term` distinguishes the driver from others, before and after it. `on_available` is called when something
        that could not run for lack of tokens may run now, in whichever core it waits.
        """
        self.term = term
        self.on_available = on_available
        self.num_created = 0
        """Budgets so far."""
        self.has_new_demand = False
        """Whether something was found that cannot run since the driver has last set this to False."""
        self._budgets: dict[str, Budget] = {}

    def __iter__(self) -> Iterator[Budget]:
        return iter(self._budgets.values())

    def __len__(self) -> int:
        return len(self._budgets)

    def charge(
        self, limits: AccountLimits, num_prompt: int, search_tokens: int | None, arrived_at: float
    ) -> Charge | None:
        """A request's charge; None without a limit. The limits of the request that arrived last apply to all."""
        if limits.tokens_per_minute is None:
            return None
        budget = self._budgets.get(limits.account)
        if budget is None:
            self.num_created += 1
            budget = self._budgets[limits.account] = Budget(limits.account, limits.tokens_per_minute, self)
        if arrived_at >= budget.stated_at:
            budget.tokens_per_minute, budget.stated_at = limits.tokens_per_minute, arrived_at
        return Charge(budget, limits.cached_token_factor, num_prompt, search_tokens)

    def find(self, limits: AccountLimits) -> Budget | None:
        """The budget that a request with these limits is paid from, if there is one yet."""
        return None if limits.tokens_per_minute is None else self._budgets.get(limits.account)

    def forget(self, budget: Budget) -> bool:
        """Drops the budget of an account; False if the account has live requests again."""
        if budget.num_live or budget.promised:
            return False
        del self._budgets[budget.account]
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless everything spent and promised is leased."""
        for budget in self:
            budget.check_integrity()

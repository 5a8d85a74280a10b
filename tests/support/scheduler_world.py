"""A scheduler over several replicas, driven in any order, with checks of its invariants.

Blocks and owners always agree, every sequence gets its correct tokens, and no request is stuck.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace

from audited_site import AuditedTier, Site
from memory_worker import Drawn, MemoryWorker, continuation, options, prompt_logprob, prompt_value
from scheduler_svc.core.beam_search import BeamSearch, num_candidates
from scheduler_svc.core.budgets import Budget
from scheduler_svc.core.events import Event, FailedEvent, Failure, PromptLogprobsEvent, ValueComputed
from scheduler_svc.core.kv.block_hash_report import TokenChain
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.replica_shape import ReplicaShape
from scheduler_svc.core.request import BeamParams, Phase, Request, RestoredSequence
from scheduler_svc.core.results import PROMPT_LOGPROBS
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, ValueResult

VOCAB_SIZE = 2
REFUSALS = {
    Failure.INVALID,
    Failure.SEARCH_TOO_WIDE,
    Failure.TOO_MANY_TOKENS,
    Failure.UNAVAILABLE,
    Failure.TENANT_OVER_QUOTA,
    Failure.DEADLINE_INFEASIBLE,
    Failure.UNSUPPORTED_RESULT,
    Failure.CONTEXT_LENGTH_EXCEEDED,
    Failure.PROMPT_TOO_COSTLY,
}


class World:
    """A scheduler, its replicas, and all events of each request."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self._counts: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()  # tokens, by account, under earlier schedulers
        self.rng = rng
        self.sites: list[Site] = []
        self.outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], int | None] = {}  # number of tokens of a truncated sequence, else None
        self.values: dict[str, object] = {}
        self.prompt_logprobs: defaultdict[str, list[object]] = defaultdict(list)
        self.failed: dict[str, Failure] = {}
        self.refused: Counter[Failure] = Counter()
        self.requests: dict[str, Request] = {}
        self.now = 0.0

    # Actions.

    def add_worker(self, shape: ReplicaShape) -> None:
        worker = MemoryWorker(
            shape.num_blocks,
            shape.block_size,
            VOCAB_SIZE,
            shape.num_host_blocks,
            self.rng,
            speculates=shape.max_sampled_tokens > 1,
            results=shape.results,
        )
        self._add(Site(shape, worker))

    def _add(self, site: Site) -> None:
        self.sites.append(site)
        self.take(self.scheduler.add_replica(site.replica))

    @property
    def counts(self) -> Counter[str]:
        """Counts of what happened: the totals of all schedulers and of this world."""
        return self._counts + Counter(asdict(self.scheduler.totals))

    @property
    def working(self) -> list[Site]:
        """The replicas that are not retired."""
        return [site for site in self.sites if not site.replica.is_retired]

    @property
    def spent(self) -> Counter[str]:
        """Tokens that each account has paid for, under all schedulers."""
        return self._spent + Counter({budget.account: budget.spent for budget in self.scheduler.budgets})

    def lease(self, share: float = 1.0) -> bool:
        """Leases a share of what each account demands, and at least the least; whether there was anything."""
        demands = [(budget, demand) for budget in self.scheduler.budgets if (demand := budget.demand) is not None]
        for budget, demand in demands:
            assert 0 < demand.least <= demand.most, "a demand is no range"
            budget.grant(max(demand.least, round(share * demand.most)))
            self._counts["leases"] += 1
        return bool(demands)

    def retire(self, site: Site) -> None:
        """Retires a replica. Sometimes another version has replaced this one, if it was the last."""
        self.take(self.scheduler.retire(site.replica))
        if self.now % 2 < 1 and self.scheduler.supersede():
            self._counts["versions superseded"] += 1

    def remove_drained(self) -> None:
        """Removes retired replicas without sequences."""
        for site in [site for site in self.sites if site.replica.is_retired and site.replica.is_idle]:
            self.lose(site)
            self._counts["replicas drained"] += 1

    def restart(self) -> None:
        """Replaces the scheduler by a new one, which restores the cached blocks of the workers."""
        live = list(self.scheduler.keys)
        chains = [
            TokenChain(request.salt, [*request.prompt, *self.outputs[key, index]])
            for key in live
            for request in [self.requests[key]]
            for index in range(request.n if request.beam is None else 0)
        ]
        self._counts.update(asdict(self.scheduler.totals))
        self._spent = self.spent
        self.scheduler = Scheduler(self.limits)
        old, self.sites = self.sites, []
        for site in old:
            self._note_published(site)
            new = Site(site.replica.shape, site.worker)
            self._counts["blocks restored"] += new.replica.kv.restore_cached_blocks(site.worker.restart(), chains)
            new.replica.check_integrity()
            self._add(new)
        for key in live:
            refused = self.scheduler.submit(self.requests[key], self.now, self._restored(self.requests[key]))
            assert refused is None, refused
            self._counts["values after a restart"] += self.requests[key].returns_value
        assert list(self.scheduler.keys) == live

    def _restored(self, request: Request) -> list[RestoredSequence]:
        if request.beam is not None:
            return [RestoredSequence([], False)]
        places = [(request.key, index) for index in range(request.n)]
        returned = self.prompt_logprobs[request.key]
        if not any(self.outputs[place] for place in places):  # then the returned ones need not be recorded
            del returned[self.rng.randint(0, len(returned)) :]
        return [RestoredSequence(list(self.outputs[place]), place in self.ended, len(returned)) for place in places]

    def lose(self, site: Site) -> None:
        self.sites.remove(site)
        self._note_published(site)
        self.take(self.scheduler.remove_replica(site.replica))

    def _note_published(self, site: Site) -> None:
        for tier in (site.replica.kv.device, site.replica.kv.host):
            assert isinstance(tier, AuditedTier)
            self._counts["hashes published again"] += tier.num_published_again

    def plan(self, site: Site, *, is_spoilt: bool = False) -> bool:
        """Plans a step and executes it; returns False if there is nothing to do. With `is_spoilt` one of its rows
        fails."""
        plan = self.scheduler.schedule(site.replica, self.now)
        if plan is None:
            return False
        self._check_size(site, plan)
        outcome = site.execute(plan)
        if is_spoilt and plan.scheduled:
            results = list(outcome.results)
            results[self.rng.randrange(len(results))] = Drawn([], failure="spoilt")
            outcome = replace(outcome, results=results)
        site.expect(plan, outcome)
        return True

    def _check_size(self, site: Site, plan: StepPlan) -> None:
        shape = site.replica.shape
        assert len(plan.scheduled) <= min(shape.max_sequences, self.limits.max_sequences)
        most = shape.max_step_tokens if len(plan.scheduled) > 1 else shape.longest_indivisible
        assert plan.num_tokens <= most, "a step is larger than its worker takes"
        indivisible = [part for part in plan.scheduled if site.replica.shape.is_indivisible(part.sequence.request)]
        if plan.num_tokens > self.limits.max_step_tokens:
            assert len(indivisible) == len(plan.scheduled) == 1, "a step exceeds the budget for several sequences"
            self._counts["steps of one that is indivisible, above the budget"] += 1
        self._counts["steps of the indivisible alone"] += 0 < len(indivisible) == len(plan.scheduled)
        self._counts["steps of the indivisible beside others"] += 0 < len(indivisible) < len(plan.scheduled)
        self._counts["preempted for values"] += sum(sequence.request.returns_value for sequence in plan.preempted)

    def commit(self, site: Site) -> None:
        """Commit the oldest step that is done."""
        if site.answers:
            plan, outcome = site.replica.steps_in_flight[0], site.take()
            parts = [plan.scheduled[place] for place in outcome.prompt_logprobs]
            known = sum(part.start < part.sequence.num_prompt_logprobs for part in parts)
            self._counts["prompt log-probabilities computed again"] += known
            for part, result in zip(plan.scheduled, outcome.results, strict=True):
                if isinstance(result, ValueResult):
                    how = site.replica.shape.results[part.sequence.request.result.name]
                    self._counts[f"values {how.name}"] += 1
            self.take(self.scheduler.commit(site.replica, outcome, self.now))

    def submit(self, request: Request) -> None:
        refused = self.scheduler.submit(request, self.now)
        if refused is None:
            self.requests[request.key] = request
        else:
            assert refused.reason in REFUSALS, refused
            self.refused[refused.reason] += 1

    def cancel(self, key: str) -> None:
        failed = self.scheduler.cancel(key)
        self.take([failed] if failed is not None else [])

    def cancel_in_mid_swap(self) -> None:
        """Cancels a request while blocks of one of its sequences are being copied, in either direction."""
        live = [sequence for key in self.scheduler.keys for sequence in self.scheduler.sequences(key)]
        swapping_in = [s for s in live if s.phase is Phase.SWAPPING_IN]
        swapping_out = [s for s in live if s.swapped_kv is not None and s.swapped_kv.num_swapping]
        sequences = self.rng.choice([group for group in (swapping_in, swapping_out) if group] or [[]])
        if sequences:
            self._counts[f"cancelled while swapping {'in' if sequences is swapping_in else 'out'}"] += 1
            self.cancel(self.rng.choice(sequences).request.key)

    def stop(self, key: str, index: int) -> None:
        """Sends a stop match at a random position; never for a value, nor within the prompt."""
        returned, request = self.outputs[key, index], self.requests[key]
        if request.returns_value or (request.result == PROMPT_LOGPROBS and not returned):
            return
        if (key, index) not in self.ended and key not in self.failed:
            length = self.rng.randint(0, len(returned))
            self.scheduler.finish(key, index, length)
            self.ended[key, index] = length

    def acknowledge(self, key: str, index: int) -> None:
        """Acknowledges all tokens that the gateway has."""
        self.scheduler.acknowledge(key, index, len(self.outputs[key, index]))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.scheduler.expire(self.now))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, FailedEvent):
                assert event.request.key not in self.failed, "failed twice"
                self.failed[event.request.key] = event.reason
                continue
            if isinstance(event, PromptLogprobsEvent):
                self._take_prompt_logprobs(event)
                continue
            place = (event.sequence.request.key, event.sequence.index)
            assert place not in self.ended, "a token after the end"
            assert place[0] not in self.failed, "a token after a failure"
            assert event.offset == len(self.outputs[place]), "a gap or a repetition"
            self.outputs[place] += event.token_ids
            if isinstance(event.end, ValueComputed):
                assert not event.token_ids, "tokens beside a value"
                self.values[place[0]] = event.end.value
            if event.end is not None:
                self.ended[place] = None

    def _take_prompt_logprobs(self, event: PromptLogprobsEvent) -> None:
        key, returned = event.request.key, self.prompt_logprobs[event.request.key]
        assert key not in self.failed, "log-probabilities of a prompt after a failure"
        assert not self.outputs.get((key, 0)), "log-probabilities of a prompt after a token"
        assert event.offset == len(returned) + 1, "a gap or a repetition in a prompt"
        assert event.logprobs, "an empty event"
        returned += event.logprobs

    # Checks.

    def check_integrity(self) -> None:
        for site in self.sites:
            site.replica.check_integrity()
            self._counts["sequences with shared blocks"] += site.check_salts()
        for budget in self.scheduler.budgets:
            self._check_budget(budget)

    @property
    def is_idle(self) -> bool:
        return not list(self.scheduler.keys) and not any(site.answers or site.worker.in_progress for site in self.sites)

    def drain(self) -> None:
        """Runs until there is nothing to do. Every request must have ended by then."""
        assert self.working, "there is no replica"
        for _ in range(20_000):
            is_busy = False
            for key, index in list(self.outputs):
                self.acknowledge(key, index)
            for site in self.sites:
                while self.plan(site):
                    is_busy = True
                if site.answers:
                    is_busy = True
                    self.commit(site)
                site.replica.check_integrity()
            if not is_busy and not self.lease(self.rng.random()):
                assert not list(self.scheduler.keys), "requests are stuck"
                return
        raise AssertionError("requests make no progress")

    def check_nothing_is_left(self) -> None:
        for site in self.sites:
            self._note_published(site)
            for tier in (site.replica.kv.device, site.replica.kv.host):
                counts = tier.pool.counts
                assert (counts.used, counts.copying) == (0, 0), "blocks leak"
                assert counts.free + counts.cached == tier.pool.num_blocks
        assert self.scheduler.num_queued == self.scheduler.num_running == 0
        assert self.scheduler.waiting.admission.num_requests == 0
        assert all(budget.promised == budget.num_live == 0 for budget in self.scheduler.budgets)

    def _check_budget(self, budget: Budget) -> None:
        budget.check_integrity()
        plans = [plan for site in self.sites for plan in site.replica.steps_in_flight]
        num_promised = 0
        for part in (part for plan in plans for part in plan.scheduled if part.samples):
            charge = part.sequence.charge
            if charge is not None and charge.budget is budget and not charge.pays_ahead:
                num_promised += 1 + part.max_extra_tokens
        live = [s for key in self.scheduler.keys for s in self.scheduler.sequences(key) if s.phase is not Phase.ENDED]
        own = [s for s in live if s.charge is not None and s.charge.budget is budget]
        charges = {id(s.charge): s.charge for s in own if s.charge is not None}
        assert budget.promised == num_promised + sum(one.num_promised_ahead for one in charges.values())
        assert budget.num_live == len(own), "live sequences of an account do not add up"
        has_slot = [s for s in own if s.phase in (Phase.RUNNING, Phase.SWAPPING_IN) and s.request.search_tokens is None]
        assert budget.num_running == len(has_slot), "running sequences of an account do not add up"
        self._counts["unpaid"] += sum(s.phase is Phase.QUEUED and not s.can_pay for s in own)

    def check_charges(self) -> None:
        """Accounts with a limit have paid for every token that was delivered, and for its prompt."""
        delivered: Counter[str] = Counter()
        for key, request in self.requests.items():
            limits = request.limits
            if limits.tokens_per_minute is None:
                continue
            num_output = sum(len(self.outputs.get((key, index), [])) for index in range(request.n))
            delivered[limits.account] += num_output
            if limits.cached_token_factor == 1 and (num_output or key in self.values):
                delivered[limits.account] += len(request.prompt)
            if key in self.values:
                self._counts["paid values"] += 1
        for account, num_tokens in delivered.items():
            assert self.spent[account] >= num_tokens, "more is delivered than was paid"

    def check_texts(self) -> None:
        for key, request in self.requests.items():
            if request.beam is not None:
                self._check_beams(request, request.beam)
                continue
            if request.returns_value:
                self._check_value(request)
                continue
            self._check_prompt_logprobs(request)
            expected = continuation(
                request.prompt, request.max_tokens, VOCAB_SIZE, request.stop_token_ids, request.min_tokens
            )
            for index in range(request.n):
                output = self.outputs.get((key, index), [])
                if key in self.failed or self.ended[key, index] is not None:
                    assert output == expected[: len(output)]
                else:
                    assert output == expected

    def _check_value(self, request: Request) -> None:
        assert not self.outputs.get((request.key, 0)), "tokens of a request for a value"
        if request.key in self.failed:
            assert request.key not in self.values
        else:
            assert self.values[request.key] == prompt_value(request.prompt, request.result.name)

    def _check_prompt_logprobs(self, request: Request) -> None:
        returned = self.prompt_logprobs.get(request.key, [])
        asked = request.result == PROMPT_LOGPROBS
        expected = [prompt_logprob(request.prompt, position) for position in range(1, len(request.prompt) * asked)]
        assert returned == (expected[: len(returned)] if request.key in self.failed else expected)

    def _check_beams(self, request: Request, beam: BeamParams) -> None:
        if request.key in self.failed:
            return
        search = BeamSearch(beam, request.max_tokens, request.stop_token_ids, request.min_tokens)
        count = num_candidates(beam.width, len(request.stop_token_ids))
        while not search.is_over:
            search.advance([options([*request.prompt, *one.tokens], VOCAB_SIZE, count) for one in search.beams])
        found = [one.tokens for one in search.finished[: request.n]]
        assert [self.outputs[request.key, index] for index in range(len(found))] == found

"""Tokens of prompts are equal in shared prefixes only."""

from benchmarks.simulator.arrivals import Arrival, Prefix
from benchmarks.simulator.prompts import STOP_TOKEN, Tokens


def arrival(prompt_tokens: int, prefix: Prefix | None = None) -> Arrival:
    return Arrival(0.0, prompt_tokens, 3, 3, prefix=prefix)


def test_prompts_have_their_lengths_and_begin_unlike_each_other() -> None:
    tokens = Tokens(seed=0)
    prompts = [tokens.prompt(arrival(1 + number % 9), number) for number in range(300)]
    assert [len(prompt) for prompt in prompts] == [1 + number % 9 for number in range(300)]
    assert len({prompt[0] for prompt in prompts}) == 300


def test_a_prompt_may_be_longer_than_the_pool_of_tokens() -> None:
    assert len(Tokens(seed=0).prompt(arrival(200_000), 0)) == 200_000


def test_prompts_of_a_prefix_are_equal_until_its_end() -> None:
    tokens = Tokens(seed=0)
    one = tokens.prompt(arrival(30, Prefix("a", 20)), 0)
    two = tokens.prompt(arrival(60, Prefix("a", 50)), 1)
    other = tokens.prompt(arrival(30, Prefix("b", 20)), 2)
    assert one[:20] == two[:20]
    assert one[20] != two[20]
    assert other[:20] != one[:20]


def test_a_prompt_may_be_nothing_but_its_prefix() -> None:
    tokens = Tokens(seed=0)
    assert tokens.prompt(arrival(20, Prefix("a", 20)), 0) == tokens.prompt(arrival(20, Prefix("a", 20)), 1)


def test_a_recorded_prompt_is_taken_as_it_is() -> None:
    assert Tokens(seed=0).prompt(Arrival(0.0, 3, 1, 1, prompt=(4, 5, 6)), 0) == [4, 5, 6]


def test_a_token_depends_on_its_place_alone_and_not_on_when_it_is_sampled() -> None:
    tokens = Tokens(seed=0)
    script = tokens.script(arrival(5), 5)
    drawn = [tokens.draw(script, place) for place in range(5, 8)]
    assert [tokens.draw(script, place) for place in (7, 6, 5)] == drawn[::-1]
    assert all(len(token.token_ids) == 1 and token.token_ids != (STOP_TOKEN,) for token in drawn)


def test_an_output_below_max_tokens_ends_with_the_stop_token() -> None:
    tokens = Tokens(seed=0)
    script = tokens.script(Arrival(0.0, 5, 2, 9), 5)
    assert tokens.draw(script, 5).token_ids != (STOP_TOKEN,)
    assert tokens.draw(script, 6).token_ids == (STOP_TOKEN,)


def test_the_same_seed_makes_the_same_tokens() -> None:
    one, two = Tokens(seed=1), Tokens(seed=1)
    assert one.prompt(arrival(40), 0) == two.prompt(arrival(40), 0)
    assert one.script(arrival(40), 40) == two.script(arrival(40), 40)
    assert Tokens(seed=2).prompt(arrival(40), 0) != two.prompt(arrival(40), 0)

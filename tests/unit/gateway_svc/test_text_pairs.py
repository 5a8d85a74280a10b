"""Templates of pairs: which tokenizers make a prompt of two texts."""

import pytest
from tokenizers.processors import TemplateProcessing

from encoder_model import encoder_tokenizer, template_processor
from gateway_svc.text_pairs import PairTemplate


def test_a_template_is_the_special_tokens_and_types_of_a_pair() -> None:
    stored = encoder_tokenizer(template_processor())
    cls, sep = stored.token_to_id("[CLS]"), stored.token_to_id("[SEP]")
    assert cls is not None
    assert sep is not None
    assert PairTemplate.of(stored) == PairTemplate((cls,), (sep,), (sep,), (0, 1), 2)


@pytest.mark.parametrize(
    ("pair", "text"),
    [("$A:1 $B:0", "other types"), ("$B:0 $A:1", "one behind the other"), ("$A:0 $B:2", "other types")],
)
def test_other_pairs_are_refused(pair: str, text: str) -> None:
    stored = encoder_tokenizer(TemplateProcessing(single="$A", pair=pair, special_tokens=[]))
    with pytest.raises(ValueError, match=text):
        PairTemplate.of(stored)

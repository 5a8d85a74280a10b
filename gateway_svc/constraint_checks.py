"""Checks of a constraint on the output that need no grammar: what it may stand beside, and its texts."""

from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.unvalidated_request import EndOfText, UnvalidatedRequest
from svc_common.errors import QuireError, Reason
from svc_common.grammars import MAX_GRAMMAR_BYTES


def check_constraint(unvalidated: UnvalidatedRequest, check: FieldChecker) -> None:
    """Rejects a constraint beside fields that it is not served with, and one without a text. Raises QuireError."""
    constraint = unvalidated.constraint
    if constraint is None:
        return
    check_combination(unvalidated, constraint.field, check)
    check_length(check.field_path(constraint.field), sum(map(len, constraint.texts)))
    for text in constraint.texts:
        check.unicode(check.field_path(constraint.field), text)
    if constraint.field is Field.CHOICE:
        if not constraint.choices:
            raise check.invalid(Field.CHOICE, "must hold at least one text")
        if "" in constraint.choices:
            raise check.invalid(Field.CHOICE, "must hold no empty text")


def check_length(where: str, length: int) -> None:
    """Rejects a constraint, which is at `where` in the request, of more characters or bytes than a grammar may have.

    Its characters come first, without any work on its text: it may have megabytes. Raises QuireError.
    """
    if length > MAX_GRAMMAR_BYTES:
        message = f"has more than {MAX_GRAMMAR_BYTES} bytes, which is the limit"
        raise QuireError(Reason.GRAMMAR_TOO_COMPLEX, message, field=where)


def check_combination(unvalidated: UnvalidatedRequest, field: Field, check: FieldChecker) -> None:
    """Rejects fields that are not served beside a constraint, which is in `field`. Raises QuireError."""
    # A text that matches is complete: no token but end-of-text may follow, so these have nothing to go on with.
    not_served: dict[str, bool] = {
        Field.BEAM_SEARCH: unvalidated.beam_search is not None,
        Field.IGNORE_EOS: unvalidated.end_of_text is EndOfText.IGNORED,
        Field.MIN_TOKENS: bool(unvalidated.min_tokens),
        # Together they might leave no token at all.
        Field.ALLOWED_TOKEN_IDS: len(unvalidated.allowed_token_ids) > 0,
        Field.BAD_WORDS: len(unvalidated.bad_words) > 0,
    }
    for which, is_given in not_served.items():
        if is_given:
            where = check.field_path(field)
            raise check.unsupported(which, f"is not served with a constraint on the output, which is in {where}")

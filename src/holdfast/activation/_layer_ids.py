"""Refuses what can be no layer id. Knows texts and lists of them, not which layers there are."""

from collections.abc import Iterable


def layer_id(name: str, value: object) -> str:
    """``value``, or ``ValueError`` unless it is a text that is not empty or blank."""
    if not isinstance(value, str) or not value or value.isspace():
        raise ValueError(f"{name} must be a text that is not blank, not {value!r:.200}")
    return value


def layer_ids(name: str, value: object) -> list[str]:
    """``value`` as a list, or ``ValueError`` unless it is an iterable of layer ids. One text is
    not: it would be taken for its letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        hint = f": give [{value!r:.200}]" if isinstance(value, str) else ""
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"{name} must be a list of layer ids, not {value!r:.200}{hint}"
        )
    return [layer_id(f"each of {name}", each) for each in value]

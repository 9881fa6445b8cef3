"""Types of fields, with what is written beside them: what options and states are declared with."""

from __future__ import annotations

from typing import Any, get_type_hints

from quiverfl.errors import QuiverError


def annotations_of(kind: type) -> dict[str, Any]:
    """Field → type; refused where a name in it means nothing outside of where it was written."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise QuiverError(
            f"{kind.__name__}: the types of its fields cannot be read ({error}). Define the class "
            "at the top level of its file, or leave `from __future__ import annotations` out."
        ) from error

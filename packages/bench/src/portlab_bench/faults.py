"""What is wrong with a value that does not fit its schema, in one line."""

from pydantic import ValidationError


def first_fault(error: ValidationError) -> str:
    """The first key that is wrong, and what is wrong with it."""
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"

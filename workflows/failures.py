"""Reading a failure's cause chain: the innermost failure that says something is the one a person needs."""

from __future__ import annotations

from temporalio.exceptions import ApplicationError


def innermost(error: BaseException) -> BaseException:
    """The innermost ApplicationError of the chain; where there is none, the innermost cause."""
    found, cause = error, error
    while True:
        if isinstance(cause, ApplicationError):
            found = cause
        if cause.__cause__ is None:
            return found if isinstance(found, ApplicationError) else cause
        cause = cause.__cause__


def sentence(error: BaseException) -> str:
    cause = innermost(error)
    return cause.message if isinstance(cause, ApplicationError) else f"{type(cause).__name__}: {cause}"


def failure_type(error: BaseException) -> str:
    cause = innermost(error)
    return (cause.type if isinstance(cause, ApplicationError) else None) or type(cause).__name__

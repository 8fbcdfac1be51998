"""What can go wrong, each with its exit code, so that the command line only has to print it."""

from __future__ import annotations

__all__ = [
    "AcceptanceError",
    "AllFailedError",
    "BudgetError",
    "InvalidFilesError",
    "MissingToolsError",
    "NoConfigurationError",
    "PlanMismatchError",
    "PlanSchemaError",
    "RankMismatchError",
    "StudyError",
    "TuneError",
    "UsageError",
    "WrongResultError",
]


class TuneError(ValueError):
    """An error that the user can act on.

    Attributes:
        exit_code: What ``hp-tune`` exits with.
        id: A stable word for scripts, as in ``--json`` errors.
        hint: The way out, one sentence, or empty.
    """

    exit_code = 2
    id = "error"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(TuneError):
    """An option, a model description or a cluster description is wrong."""

    id = "usage"


class NoConfigurationError(TuneError):
    """Every point of the space is rejected."""

    exit_code = 3
    id = "no-configuration"


class BudgetError(TuneError):
    """The budget ran out before everything was measured; what was is written, and goes on."""

    exit_code = 4
    id = "budget"


class AllFailedError(TuneError):
    """Everything that was measured failed."""

    exit_code = 6
    id = "all-failed"


class MissingToolsError(TuneError):
    """A compiler or a device that was asked for is not on this machine."""

    exit_code = 5
    id = "missing-tools"


class WrongResultError(TuneError):
    """A kernel that was checked does not give what its reference gives."""

    exit_code = 7
    id = "wrong-result"


class StudyError(TuneError):
    """The study file belongs to another search, is locked, unreadable or broken."""

    exit_code = 8
    id = "study"


class PlanSchemaError(TuneError):
    """A plan file is not one, or was changed by hand."""

    exit_code = 8
    id = "plan-schema"


class PlanMismatchError(TuneError):
    """A plan is asked about something that it was not made for."""

    exit_code = 8
    id = "plan-mismatch"


class RankMismatchError(TuneError):
    """The ranks of a job do not hold the same plan."""

    exit_code = 8
    id = "rank-mismatch"


class AcceptanceError(TuneError):
    """Recorded measurements are predicted worse than they must be."""

    exit_code = 7
    id = "acceptance"


class InvalidFilesError(TuneError):
    """Files that were checked are wrong; the exit code is that of the first."""

    id = "invalid-files"

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code

"""The one exception whose message is meant for the user as it stands."""


class UserError(ValueError):
    """Something the user can mend.

    The message is one clear sentence: what was expected, what was found, what to do. `sbeval` commands print the
    message alone and exit with code 1; under plain `lm_eval` the registration plugin does the same.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

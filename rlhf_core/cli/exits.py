"""End a command with its exit code and one message that says why."""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

import rlhf_core.cli.extensions as extensions
from rlhf_core.errors import InputError, RunError, Stopped, error_line, is_library_error, name_too_long, warn
from rlhf_core.hidden import hide_in_output
from rlhf_core.runtime import job, signals
from rlhf_core.runtime.files import DISK, disk_message

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75
INTERRUPTED = 130


def run(command: Callable[[], Any]) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 bad input or configuration, 75 stopped with its state saved.

    130 after a second Ctrl-C.
    """
    warned: list[str] = []
    warnings.showwarning = functools.partial(_show_warning, warned)
    logging.setLogRecordFactory(_Record)
    hide_in_output()
    code, message = _attempt(command)
    signals.ignore_until_exit()
    if code:
        message = _for_reader(message)
        job.end(code, message)
        if message:
            print(message, file=sys.stderr, flush=True)
    if code == INTERRUPTED:  # Python's own exit would wait for the computation
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _attempt(command: Callable[[], Any]) -> tuple[int, str]:
    """Run a command; return its exit code and message: of an unexpected error, the traceback."""
    try:
        command()
    except SystemExit as ended:  # typer raises it after success, too
        return (ended.code if isinstance(ended.code, int) else int(bool(ended.code))), ""
    except InputError as error:
        return BAD_INPUT, str(error)
    except Stopped as stopped:
        return STOPPED, str(stopped)
    except RunError as error:
        return FAILED, str(error)
    except KeyboardInterrupt:
        if not signals.stop_requested():  # another command, or a press before the handlers were set
            raise
        return INTERRUPTED, signals.NOW
    except BaseException as error:
        if not is_library_error(error):
            raise
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return BAD_INPUT, name_too_long(error)
        if isinstance(error, OSError) and error.errno in DISK:
            return FAILED, f"{disk_message(error)} and rerun the same command"
        return FAILED, traceback.format_exc()
    return DONE, ""


class Commands(TyperGroup):
    """Core's commands and those of installed distributions, whose usage errors are shown like every other message."""

    @cached_property
    def _added(self) -> dict[str, list[EntryPoint]]:
        return extensions.find()

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names of all commands; warns of a distribution's command that cannot be loaded."""
        for name in sorted(set(self._added) - set(self.commands)):
            try:
                self._load(name)
            except InputError as error:
                warn(str(error))
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if no command has that name.

        Raises InputError for a distribution's command that is not installed or cannot be loaded.
        """
        if cmd_name not in self.commands:
            if cmd_name in {*self._added, *extensions.DISTRIBUTIONS}:
                self._load(cmd_name)
            else:
                self.list_commands(ctx)  # for the suggestion of the nearest
        return self.commands.get(cmd_name)

    def _load(self, name: str) -> None:
        given = extensions.load(name, self._added)
        app = given
        if not isinstance(given, typer.Typer):
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(name)(given)
        self.commands[name] = typer.main.get_command(app)

    def main(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Parse arguments, run a command and exit."""
        try:
            code = super().main(*arguments, **{**settings, "standalone_mode": False})
        except typer.Abort:
            code = FAILED
        except SystemExit as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            own = frame.f_globals["__name__"].partition(".")[0] in (
                "typer",
                "click",
            )  # shell completion has ended
            if (
                own or getattr(error.__context__, "errno", None) == errno.EPIPE
            ):  # typer's, of a reader that is gone
                raise
            # A loss or a logger may call exit().
            raise RunError(
                f"code that the command called {error_line(error)}; raise an exception instead"
            ) from error
        except Exception as error:
            show_usage = getattr(error, "show", None)  # typer does not export the class
            if show_usage is None:
                raise
            text = io.StringIO()
            show_usage(file=text)
            print(_for_reader(text.getvalue().rstrip("\n")), file=sys.stderr, flush=True)
            code = getattr(error, "exit_code", BAD_INPUT)
        sys.exit(code if isinstance(code, int) else DONE)


class _Record(logging.LogRecord):
    """What a library logs, which may quote a file name, a header or an address."""

    def getMessage(self) -> str:  # noqa: N802  # the library's name
        if self.exc_info and not self.exc_text:  # formatted once, here
            self.exc_text = _for_reader("".join(traceback.format_exception(*self.exc_info))).rstrip()
        return _for_reader(super().getMessage())


def _for_reader(message: str) -> str:
    """Call `escape_control`, whose module imports rich, which `--help` does not need."""
    from rlhf_core.runtime.terminal import escape_control

    return escape_control(message)


def _show_warning(warned: list[str], message: Warning | str, *_: Any, **__: Any) -> None:
    if str(message) in warned:  # by a check of what is then done
        return
    warned.append(str(message))
    print(_for_reader(f"warning: {message}"), file=sys.stderr, flush=True)

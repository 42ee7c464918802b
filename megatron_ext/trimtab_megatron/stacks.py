"""Where a rank is in its program, told from another thread though its main thread hangs.

For an interpreter that is stuck itself, in native code that keeps the interpreter's lock, SIGUSR2 has the stacks of all
threads written to stderr.
"""

import faulthandler
import signal
import sys
import threading
import traceback

MOST_FRAMES = 50
"""The innermost ones are kept: they say what a rank waits for."""
LONGEST_LINE = 200


def answer_signals() -> None:
    """From now on SIGUSR2 has all stacks written to stderr."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def main_thread() -> str:
    """The frames of the main thread, the innermost last, two lines each: where, and the line of its source."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    summary = traceback.extract_stack(frame)
    lines = [f"... {len(summary) - MOST_FRAMES} more"] if len(summary) > MOST_FRAMES else []
    for entry in summary[-MOST_FRAMES:]:
        lines.append(f'File "{entry.filename}", line {entry.lineno}, in {entry.name}')
        if entry.line:
            lines.append(f"  {entry.line}")
    return "\n".join(line[:LONGEST_LINE] for line in lines)

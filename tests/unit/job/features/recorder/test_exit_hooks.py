"""Signals and exceptions reach the listeners, and then whoever had them before; each case in a process of its own."""

import signal
import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, sys, threading, time
from msprobe_megatron.job.features.recorder.exit_hooks import EXIT_HOOKS
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests were started in the background
def say(text):
    os.write(1, (text + "\\n").encode())
listener = lambda reason: say("told " + reason)
def wait(seconds=30):
    # Not one sleep: a signal between the last look of the interpreter and the sleep would not end it, in any Python.
    for _ in range(int(seconds * 10)):
        time.sleep(0.1)
"""


def run(code, send=None, timeout=20):
    """Output and return code of a program; `send` goes to it when it has said ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        if send is not None:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            process.send_signal(send)
        out, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return out.split("\n")[:-1], process.returncode


ADD = "print(EXIT_HOOKS.add(listener, signals=True), file=sys.stderr); say('ready')\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_default_happens_after_the_listeners(number):
    lines, code = run("signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + ADD + "wait()", number)
    assert lines == [f"told signal {number.name}"]
    assert code == -number


def test_python_handler_from_before_is_called():
    before = "signal.signal(signal.SIGTERM, lambda n, f: (say('before'), sys.exit(7)))\n"
    assert run(before + ADD + "wait()", signal.SIGTERM) == (["told signal SIGTERM", "before"], 7)


def test_a_handler_that_comes_later_decides():
    later = "signal.signal(signal.SIGTERM, lambda n, f: say('later')); say('ready')"
    lines, code = run(ADD.replace("say('ready')", later) + "wait(2.5)\nsay('going on')", signal.SIGTERM)
    assert sorted(lines[:2]) == ["later", "told signal SIGTERM"]
    assert (lines[2:], code) == (["going on"], 0)


def test_keyboard_interrupt_is_still_raised():
    code = "try:\n    " + ADD + "    wait()\nexcept KeyboardInterrupt: say('interrupted')"
    assert run(code, signal.SIGINT) == (["told signal SIGINT", "interrupted"], 0)


def test_usr1_is_a_request_and_the_job_goes_on():
    assert run(ADD + "wait(1)\nsay('going on')", signal.SIGUSR1) == (["told signal SIGUSR1", "going on"], 0)


def test_while_the_main_thread_is_in_c_code():
    # Locking a mutex twice blocks for ever and, unlike a sleep, does not come back for a signal.
    stuck = (
        "import ctypes\nlibrary, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)\n"
        + ADD
        + "library.pthread_mutex_lock(mutex)\nlibrary.pthread_mutex_lock(mutex)\nsay('not reached')"
    )
    assert run(stuck, signal.SIGTERM) == (["told signal SIGTERM"], -signal.SIGTERM)


def test_uncaught_exception_is_told_and_shown():
    lines, code = run("EXIT_HOOKS.add(listener, signals=False)\nraise ValueError('x')")
    assert (lines, code) == (["told exception ValueError"], 1)


def test_handler_that_is_not_of_python_is_left_alone():
    code = (
        "import faulthandler\nfaulthandler.register(signal.SIGUSR1)\nnotes = EXIT_HOOKS.add(listener, signals=True)\n"
    )
    lines, _ = run(code + "say(str(notes))\nos.kill(os.getpid(), signal.SIGUSR1)\ntime.sleep(0.3)\nsay('end')")
    assert "SIGUSR1 is not watched: other code than Python's handles it" in lines[0]
    assert lines[1:] == ["end"]


def test_forked_children_are_left_alone():
    code = (
        ADD + "child = os.fork()\n"
        "if not child:\n    wait()\n"
        "time.sleep(0.2)\nos.kill(child, signal.SIGTERM)\n"
        "say(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))\ntime.sleep(0.3)\nsay('parent untold')"
    )
    lines, _ = run(code)
    assert lines == ["ready", "-15", "parent untold"]


def test_everything_is_put_back():
    code = (
        "hook, term, integer = sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)\n"
        "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)\n" + ADD + "EXIT_HOOKS.remove(listener)\n"
        "same = (sys.excepthook is hook, signal.getsignal(signal.SIGTERM) == term,"
        " signal.getsignal(signal.SIGINT) == integer, signal.set_wakeup_fd(-1) == w)\nsay(str(same))"
    )
    assert run(code)[0] == ["ready", "(True, True, True, True)"]


def test_wakeup_descriptor_from_before_still_hears():
    code = (
        "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)\n"
        + ADD
        + "wait(1)\nsay(str(os.read(r, 1)[0]))"
    )
    assert run(code, signal.SIGUSR1)[0] == ["told signal SIGUSR1", str(int(signal.SIGUSR1))]


def test_when_another_took_the_wakeup_descriptor():
    code = ADD.replace(
        "say('ready')", "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w); say('ready')"
    )
    assert run(code + "wait(1)\nsay('end')", signal.SIGUSR1)[0] == ["told signal SIGUSR1", "end"]

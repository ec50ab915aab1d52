"""Targets of the tests: processes of `rio target serve`."""

import os
import pathlib
import re
import subprocess
import tempfile
import time

RIO = os.environ["RIO"]


class Site:
    """A target with a drive in a file and a log, which a test can kill and start again. It is made without being started."""

    def __init__(self, drive="mem:32M", options=()):
        self._dir = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self._dir.name)
        self._drive = drive.format(dir=self.path)
        # In these, {dir} is the folder of the site.
        self._options = [option.format(dir=self.path) for option in options]
        self._port = 0
        self._process = None

    def started(self):
        self.start()
        return self

    def start(self):
        log = self.path / "target.log"
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [RIO, "target", "serve", "-a", "127.0.0.1", "-s", str(self._port), "--create", "--drive", self._drive,
                 "--log", f"file:{self.path}/log,size=1M", *self._options],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            text = log.read_text()
            found = re.search(r"^nqn.* at 127\.0\.0\.1:(\d+)", text, re.MULTILINE)
            if found and "gain to expect" in text:
                self._port = int(found[1])
                return
            assert self._process.poll() is None, text
            time.sleep(0.02)
        raise AssertionError(f"the target did not start: {text}")

    @property
    def members(self):
        return [f"127.0.0.1:{self._port}"]

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        self.kill()
        self._dir.cleanup()

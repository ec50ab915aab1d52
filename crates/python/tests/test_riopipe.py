"""The package against targets of this machine."""

import array
import asyncio
import base64
import gc
import os
import pathlib
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import unittest
import zlib

import riopipe
from riopipe import BLOCK_BYTES, Code, Place

from site_of_targets import Site


def block(letter, blocks=1):
    return letter.encode() * (blocks * BLOCK_BYTES)


class WithVolume(unittest.TestCase):
    """A new volume with four streams, and its first stream, for each test."""

    DRIVE = "mem:32M"

    def setUp(self):
        self.site = Site(self.DRIVE).started()
        self.addCleanup(self.site.close)
        riopipe.create("v", self.site.members, streams=4)
        connect = riopipe.ConnectOptions(loss_timeout=20.0, spin=0.0)
        self.volume = riopipe.open("v", self.site.members, connect=connect)
        self.addCleanup(self.volume.free)
        self.stream = self.volume.stream(0)
        self.addCleanup(self.stream.free)

    def raises(self, code, call, *args, **kwargs):
        with self.assertRaises(riopipe.Error) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.code, code, str(caught.exception))
        return caught.exception


class Volumes(WithVolume):
    def test_properties_lists_and_figures(self):
        info = self.volume.info
        self.assertEqual((info.name, info.streams, info.engine, info.block_size), ("v", 4, "rio", BLOCK_BYTES))
        self.assertEqual(self.volume.engine, "rio")
        found = riopipe.inspect(self.site.members)
        self.assertEqual((found.id, found.blocks, found.members), (info.id, info.blocks, info.members))
        self.assertEqual(riopipe.list_volumes(self.site.members)["volumes"][0]["name"], "v")
        self.assertEqual(riopipe.stat(self.volume)["volume"], "v")
        self.assertTrue(self.volume.recovery.is_nothing)
        self.assertIn("nothing to recover", str(self.volume.recovery))
        self.assertEqual(self.volume.recovery.stream(0).last, 0)
        self.assertIsNone(self.volume.recovery.stream(9))

    def test_a_volume_has_one_owner_until_it_is_closed(self):
        error = self.raises(Code.OWNED, riopipe.open, "v", self.site.members)
        self.assertIsInstance(error, riopipe.Owned)
        self.assertTrue(error.retryable)
        self.raises(Code.STREAMS_OPEN, self.volume.close)
        self.stream.close()
        self.volume.close()
        self.volume.close()
        self.raises(Code.CLOSED, self.volume.stream, 1)
        with riopipe.open("v", self.site.members) as again:
            self.assertEqual(again.info.generation, self.volume.info.generation + 1)
        riopipe.delete("v", self.site.members)
        self.raises(Code.NOT_FOUND, riopipe.delete, "v", self.site.members)

    def test_options_that_are_wrong_are_refused(self):
        self.raises(Code.ADDRESS, riopipe.inspect, ["127.0.0.1:x"])
        self.raises(Code.OPTION, riopipe.open, "v", self.site.members, engine="fast")
        self.raises(Code.OPTION, self.volume.stream, 1, queue_depth=5000)
        self.raises(Code.NOT_FOUND, self.volume.stream, 4)
        error = self.raises(Code.MEMBERS, riopipe.open, "w", self.site.members)
        self.assertEqual(error.members, riopipe.Members.NAME)
        self.raises(Code.UNREACHABLE, riopipe.inspect, ["127.0.0.1:1"])
        for wrong in (-1.0, float("nan"), float("inf"), 1e300):
            with self.assertRaises(ValueError):
                self.stream.wait_idle(wrong)
        with self.assertRaises(ValueError):
            riopipe.ConnectOptions(host_id=b"short")

    def test_the_end_of_a_block_closes(self):
        self.stream.close()
        self.volume.close()
        with riopipe.open("v", self.site.members) as volume:
            with volume.stream(0) as stream:
                stream.group().write(0, block("a"), Place.FRESH).submit()
            self.assertTrue(stream.closed)
        self.raises(Code.CLOSED, volume.stream, 0)
        # An exception passes, and the volume is free even so.
        with self.assertRaises(ZeroDivisionError):
            with riopipe.open("v", self.site.members) as volume, volume.stream(0) as stream:
                1 / 0
        riopipe.open("v", self.site.members).close()


class Writes(WithVolume):
    def test_groups_are_submitted_and_read_back(self):
        buf = self.stream.buf(2 * BLOCK_BYTES)
        self.assertEqual(len(buf), 2 * BLOCK_BYTES)
        with memoryview(buf) as memory:
            self.assertFalse(memory.readonly)
            memory[:] = block("a", 2)
        group = self.stream.group().write(0, buf, Place.FRESH).write(2, block("b"), Place.EXTEND).tag(7)
        self.assertEqual(len(group), 2)
        self.assertEqual(group.submit(), 1)
        self.assertEqual((group.seq, len(group)), (1, 0))
        with self.stream.group(durable=True) as group:
            group.write(3, array.array("I", [0x63636363] * 1024), Place.IN_PLACE).discard(1)
        self.assertEqual(group.seq, 2)
        marks = self.stream.wait_durable(2, 10)
        self.assertEqual((marks.complete, marks.durable), (2, 2))
        self.assertEqual(marks, self.stream.poll())
        self.assertEqual(self.stream.last, 2)
        self.assertEqual(self.stream.read(0, 4), block("a") + block("\0") + block("b") + block("c"))

    def test_a_group_is_not_submitted_after_an_exception(self):
        with self.assertRaises(ZeroDivisionError):
            with self.stream.group() as group:
                group.write(0, block("a"), Place.FRESH)
                1 / 0
        self.assertEqual((len(group), self.stream.last), (0, 0))
        with self.assertRaises(ValueError):
            group.seq

    def test_a_buffer_moves_into_the_write(self):
        buf = self.stream.buf()
        view = memoryview(buf)
        group = self.stream.group()
        # Python could still write to bytes that are sent.
        with self.assertRaises(BufferError):
            group.write(0, buf, Place.FRESH)
        view[:3] = b"abc"
        view.release()
        group.write(0, buf, Place.FRESH)
        with self.assertRaises(BufferError):
            memoryview(buf)
        self.raises(Code.CLOSED, len, buf)
        self.raises(Code.CLOSED, group.write, 0, buf, Place.FRESH)
        group.submit()
        self.assertEqual(self.stream.read(0)[:3], b"abc")

    def test_views_keep_the_buffer_alive(self):
        view = memoryview(self.stream.buf())
        gc.collect()
        view[:] = block("x")
        self.assertEqual(view[-1], ord("x"))
        # The stream is gone, the memory is not.
        self.stream.free()
        view[0] = 1
        self.assertEqual(view[0], 1)

    def test_bytes_are_copied(self):
        data = bytearray(block("a"))
        group = self.stream.group().write(0, data, Place.FRESH)
        data[:] = block("b")
        group.submit()
        self.assertEqual(self.stream.read(0), block("a"))

    def test_what_is_wrong_is_refused_and_the_group_is_as_before(self):
        group = self.stream.group()
        self.raises(Code.EMPTY, group.submit)
        self.raises(Code.RANGE, self.stream.buf, 100)
        self.raises(Code.RANGE, group.write, 0, b"short", Place.FRESH)
        self.raises(Code.RANGE, group.discard, 0, 0)
        with self.assertRaises(ValueError):
            group.write(0, block("a"), "new")
        with self.assertRaises(TypeError):
            group.write(0, 7, Place.FRESH)
        group.write(1 << 40, block("a"), Place.FRESH)
        for _ in range(2):
            error = self.raises(Code.RANGE, group.submit)
            self.assertIn("1099511627776", str(error))
        group.reset()
        self.raises(Code.EMPTY, group.submit)

    def test_a_full_stream_pushes_back(self):
        self.stream.free()
        stream = self.volume.stream(1, kept_bytes_max=2 * BLOCK_BYTES)
        self.addCleanup(stream.free)
        for lba in range(2):
            stream.group().write(lba, block("a"), Place.FRESH).submit()
        group = stream.group().write(2, block("b"), Place.FRESH)
        self.assertIsInstance(self.raises(Code.FULL, group.submit, durable=True, timeout=0), riopipe.Full)
        stream.wait_space(10)
        self.assertEqual(group.submit(durable=True), 3)
        stream.wait_durable(3, 10)
        self.assertEqual(stream.read(2), block("b"))

    def test_another_place_for_one_block(self):
        for place in Place:
            seq = self.stream.group().write(5, block(place[0]), place).submit(durable=True)
        self.stream.wait_durable(seq, 10)
        self.assertEqual(self.stream.read(5), block("e"))


class Secrets(unittest.TestCase):
    """A target that demands authentication."""

    HOST = "nqn.2026-01.org.example:host"

    def setUp(self):
        self.site = Site(options=("--dhchap-host", self.HOST + "={dir}/host", "--dhchap-ctrl-secret", "{dir}/targets"))
        self.addCleanup(self.site.close)
        self.files = {}
        self.texts = []
        for byte, name in enumerate(("host", "targets", "wrong")):
            key = bytes([byte + 65]) * 32
            text = base64.b64encode(key + zlib.crc32(key).to_bytes(4, "little")).decode()
            self.texts.append(text)
            self.files[name] = self.site.path / name
            self.files[name].write_text(f"DHHC-1:00:{text}:\n")
            self.files[name].chmod(0o600)
        self.site.start()

    def options(self, secret=None, ctrl=None):
        return riopipe.ConnectOptions(
            host_nqn=self.HOST, dhchap_secret_file=secret and self.files[secret],
            dhchap_ctrl_secret_file=ctrl and str(self.files[ctrl]),
        )

    def refused(self, code, call):
        with self.assertRaises(riopipe.Error) as caught:
            call()
        self.assertEqual(caught.exception.code, code, str(caught.exception))
        for text in self.texts:
            self.assertNotIn(text[4:20], str(caught.exception))
        return str(caught.exception)

    def test_right_ones(self):
        members = self.site.members
        riopipe.create("v", members, connect=self.options("host"))
        with riopipe.open("v", members, connect=self.options("host", "targets")) as volume:
            with volume.stream(0) as stream:
                stream.wait_durable(stream.group(durable=True).write(0, block("a"), Place.FRESH).submit(), 10)
        for text in self.texts:
            self.assertNotIn(text[4:20], repr(self.options("host", "targets")))

    def test_wrong_ones_and_none(self):
        inspect = lambda *names: lambda: riopipe.inspect(self.site.members, connect=self.options(*names))
        for names in ((), ("wrong",), ("host", "wrong")):
            self.assertIn("authenticate", self.refused(Code.AUTHENTICATION, inspect(*names)))
        self.refused(Code.OPTION, lambda: self.options(ctrl="targets"))
        self.files["host"].chmod(0o640)
        self.assertIn("0640", self.refused(Code.OPTION, lambda: self.options("host")))
        self.files["host"].unlink()
        self.assertIn("host", self.refused(Code.OPTION, lambda: self.options("host")))


class Reads(WithVolume):
    def setUp(self):
        super().setUp()
        seq = self.stream.group().write(0, block("a") + block("b") + block("c"), Place.FRESH).submit(durable=True)
        self.stream.wait_durable(seq, 10)

    def check(self, source):
        into = bytearray(3 * BLOCK_BYTES)
        source.read_into(0, into)
        self.assertEqual(into, block("a") + block("b") + block("c"))
        view = memoryview(into)
        source.read_many([(2, view[:BLOCK_BYTES]), (0, view[BLOCK_BYTES:2 * BLOCK_BYTES])])
        self.assertEqual(into, block("c") + block("a") + block("c"))
        words = array.array("Q", bytes(BLOCK_BYTES))
        source.read_into(1, words)
        self.assertEqual(words.tobytes(), block("b"))
        self.raises(Code.ARGUMENT, source.read_many, [(0, view[:BLOCK_BYTES]), (1, view[1:BLOCK_BYTES + 1])])
        self.raises(Code.RANGE, source.read_into, 0, bytearray(5))
        self.raises(Code.RANGE, source.read, 1 << 40)
        with self.assertRaises(BufferError):
            source.read_into(0, bytes(BLOCK_BYTES))
        with self.assertRaises(BufferError):
            source.read_into(0, memoryview(bytearray(2 * BLOCK_BYTES))[::2])
        source.read_many([])

    def test_a_stream_reads(self):
        self.check(self.stream)

    def test_a_reader_reads(self):
        self.check(self.volume.reader(concurrent=2))

    def take(self, count):
        ends = []
        while len(ends) < count:
            self.stream.wait_read(10)
            ends += self.stream.read_ends()
        self.assertEqual(len(ends), count)
        self.assertEqual(self.stream.read_ends(), [])
        return ends

    def test_submitted_reads_end_later(self):
        submitted = {}
        for n in range(300):
            memory = bytearray(BLOCK_BYTES)
            submitted[self.stream.submit_read(n % 3, memory)] = (n % 3, memory)
        self.assertEqual(len(submitted), 300)
        for end in self.take(300):
            lba, memory = submitted.pop(end.id)
            self.assertIsNone(end.error, repr(end))
            self.assertIs(end.memory, memory)
            self.assertEqual(memory, block("abc"[lba]))
            memory.append(0)  # It is nobody else's any more.
        self.stream.wait_read()  # None is in flight.

    def test_submitted_reads_hold_their_memory(self):
        memory = bytearray(BLOCK_BYTES)
        seq = self.stream.group().write(0, block("x"), Place.EXTEND).submit()
        id = self.stream.submit_read(0, memory)
        with self.assertRaises(BufferError):
            memory.append(0)
        self.assertIsNone(self.take(1)[0].error)
        self.assertEqual(memory, block("x"))
        self.assertFalse(self.stream.cancel_read(id))
        self.stream.wait_complete(seq, 10)
        # Of an object without another reference.
        self.stream.submit_read(1, bytearray(BLOCK_BYTES))
        gc.collect()
        self.assertEqual(self.take(1)[0].memory, block("b"))

    def test_submitted_reads_that_fail_have_an_error(self):
        self.raises(Code.RANGE, self.stream.submit_read, 0, bytearray(5))
        self.raises(Code.RANGE, self.stream.submit_read, 1 << 40, bytearray(BLOCK_BYTES))
        with self.assertRaises(BufferError):
            self.stream.submit_read(0, bytes(BLOCK_BYTES))
        memory = bytearray(BLOCK_BYTES)
        id = self.stream.submit_read(0, memory)
        self.assertTrue(self.stream.cancel_read(id))
        (end,) = self.stream.read_ends()
        self.assertEqual((end.id, end.error.code), (id, Code.CANCELLED))
        memory.append(0)
        self.site.kill()
        memory = bytearray(BLOCK_BYTES)
        self.stream.submit_read(0, memory, timeout=0.2)
        (end,) = self.take(1)
        self.assertIsInstance(end.error, riopipe.Timeout)

    def test_the_end_of_a_stream_frees_the_memory_of_its_reads(self):
        for end in (riopipe.Stream.free, riopipe.Stream.close):
            memory = bytearray(BLOCK_BYTES)
            self.stream.submit_read(0, memory)
            end(self.stream)
            memory.append(0)
            self.stream = self.volume.stream(0)

    def test_an_event_loop_reads(self):
        for lba in range(3):
            self.stream.submit_read(lba, bytearray(BLOCK_BYTES))
        ends = []
        while len(ends) < 3:
            self.stream.poll()
            ends += self.stream.read_ends()
            if len(ends) < 3:
                deadline = self.stream.next_deadline()
                select.select([self.stream.fileno()], [], [], 10 if deadline is None else min(deadline, 10))
        self.assertEqual(sorted(bytes(end.memory[:1]) for end in ends), [b"a", b"b", b"c"])

    def test_threads_share_a_reader(self):
        reader = self.volume.reader(concurrent=2)
        results = []
        read = lambda lba: results.append((lba, bytes(reader.read(lba))))
        threads = [threading.Thread(target=read, args=(n % 3,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(results), 8)
        for lba, data in results:
            self.assertEqual(data, block("abc"[lba]))


class Waits(WithVolume):
    def test_a_time_limit_ends_a_wait(self):
        error = self.raises(Code.TIMEOUT, self.stream.wait_moved, 0.3)
        self.assertIsInstance(error, TimeoutError)
        self.assertTrue(error.retryable)
        self.raises(Code.NOT_SUBMITTED, self.stream.wait_durable, 9, 1)

    def test_other_threads_run_during_a_wait_and_wake_it(self):
        waker = self.stream.waker()
        began = threading.Event()
        outcome = []

        def wait():
            began.set()
            while not outcome:
                try:
                    self.stream.wait_moved()
                except riopipe.Woken as error:
                    outcome.append(error)
                except riopipe.Busy:
                    pass  # the other thread was first

        thread = threading.Thread(target=wait)
        thread.start()
        began.wait()
        # This thread runs, so the wait has released the lock of the interpreter. The stream is in use until it is woken.
        end = time.monotonic() + 60
        while True:
            try:
                self.stream.poll()
            except riopipe.Busy as error:
                self.assertTrue(error.retryable)
                break
            self.assertLess(time.monotonic(), end)
        waker.wake()
        thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertEqual([error.code for error in outcome], [Code.WOKEN])

    def test_a_watch_waits_in_another_thread(self):
        watch = self.stream.watch()
        result = []
        thread = threading.Thread(target=lambda: result.append(watch.wait_durable(1, 60)))
        thread.start()
        self.stream.group().write(0, block("a"), Place.FRESH).submit(durable=True)
        thread.join(60)
        self.assertEqual([marks.durable for marks in result], [1])
        self.assertEqual(watch.marks().durable, 1)
        self.assertFalse(watch.has_failed)
        self.raises(Code.TIMEOUT, watch.wait_durable, 5, 0.2)
        self.stream.close()
        self.raises(Code.CLOSED, watch.wait_durable, 5, 60)

    def test_asyncio_waits_without_a_thread(self):
        async def run():
            watch = self.stream.watch()
            threads = threading.active_count()
            waits = [asyncio.create_task(watch.durable(seq)) for seq in (1, 2, 3)]
            waits.append(asyncio.create_task(watch.complete(3)))
            await asyncio.sleep(0)
            self.assertEqual(threading.active_count(), threads)
            for lba in range(3):
                self.stream.group().write(lba, block("a"), Place.FRESH).submit(durable=lba == 2)
            marks = await asyncio.wait_for(asyncio.gather(*waits), 60)
            for seq in (1, 2, 3):
                self.assertGreaterEqual(marks[seq - 1].durable, seq)
            self.assertEqual(marks[3].complete, 3)
            # One that is over, one that is cancelled, one whose stream ends.
            self.assertGreaterEqual((await watch.durable(1)).durable, 1)
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(watch.durable(9), 0.1)
            last = asyncio.create_task(watch.durable(9))
            await asyncio.sleep(0)
            self.stream.close()
            with self.assertRaises(riopipe.Closed):
                await asyncio.wait_for(last, 60)

        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(run())
        gc.collect()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)

    def test_the_descriptor_is_readable_when_there_is_progress(self):
        self.stream.group().write(0, block("a"), Place.FRESH).submit(durable=True)
        poll = select.poll()
        poll.register(self.stream, select.POLLIN)
        end = time.monotonic() + 60
        while self.stream.poll().durable < 1:
            self.assertLess(time.monotonic(), end)
            left = self.stream.next_deadline()
            poll.poll(1000 if left is None else min(1000, left * 1000))

    def test_ctrl_c_ends_a_wait(self):
        def interrupt(signum, frame):
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGALRM, interrupt)
        self.addCleanup(signal.signal, signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with self.assertRaises(KeyboardInterrupt):
            self.stream.wait_moved(60)
        # The stream is as before.
        self.assertEqual(self.stream.poll().complete, 0)

    def test_errors_can_be_pickled(self):
        error = self.raises(Code.TIMEOUT, self.stream.wait_moved, 0)
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), again.code, str(again)), (riopipe.Timeout, Code.TIMEOUT, str(error)))


class Crashes(WithVolume):
    DRIVE = "file:{dir}/drive,size=32M"

    def test_a_killed_target_is_replayed_to(self):
        for lba in range(64):
            self.stream.group().write(lba, block("a"), Place.FRESH).submit()
        self.stream.send()
        self.site.kill()
        seq = self.stream.group().write(64, block("b"), Place.FRESH).submit(durable=True)
        self.site.start()
        self.stream.wait_durable(seq, 60)
        self.assertEqual(self.stream.read(0, 65), block("a", 64) + block("b"))

    def test_a_stream_fails_when_its_target_stays_away(self):
        self.stream.free()
        self.volume.free()
        connect = riopipe.ConnectOptions(loss_timeout=0.2)
        volume = riopipe.open("v", self.site.members, take_over=True, connect=connect)
        self.addCleanup(volume.free)
        with self.assertRaises(riopipe.StreamFailed) as caught:
            with volume.stream(0) as stream:
                stream.group().write(0, block("a"), Place.FRESH).submit()
                self.site.kill()
                stream.wait_durable(1, 60)
        self.assertEqual(caught.exception.code, Code.FAILED)
        self.assertFalse(caught.exception.retryable)
        self.assertTrue(stream.closed)

    def test_a_stream_that_was_freed_is_recovered(self):
        seq = self.stream.group().write(0, block("a"), Place.FRESH).tag(42).submit(durable=True)
        self.stream.wait_durable(seq, 10)
        self.stream.free()
        with self.volume.stream(0) as stream:
            found = stream.recovery
            self.assertEqual((found.last, found.tag, found.acknowledge), (seq, 42, False))
            self.assertEqual(self.volume.pending(0), [])
            self.raises(Code.NOT_PENDING, self.volume.acknowledge, 0)
            self.raises(Code.HEALTHY, stream.reopen)

    def test_what_was_durable_survives_the_process(self):
        self.stream.close()
        self.volume.close()
        program = (
            "import riopipe, sys, os\n"
            "stream = riopipe.open('v', sys.argv[1:]).stream(0)\n"
            "for n in range(1, 100):\n"
            "    seq = stream.group().write(n, n.to_bytes(8) * 512, riopipe.Place.FRESH).tag(n).submit(durable=n == 50)\n"
            "stream.wait_durable(50)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-c", program, *self.site.members], timeout=120)
        self.assertEqual(done.returncode, -signal.SIGKILL)
        with riopipe.open("v", self.site.members, take_over=True) as volume, volume.stream(0) as stream:
            last = volume.recovery.stream(0).tag
            self.assertGreaterEqual(last, 50)
            blocks = stream.read(1, 99)
            for n in range(1, 100):
                expected = n.to_bytes(8) * 512 if n <= last else bytes(BLOCK_BYTES)
                self.assertEqual(blocks[(n - 1) * BLOCK_BYTES:n * BLOCK_BYTES], expected, n)


class Package(unittest.TestCase):
    def test_the_codes_have_their_numbers(self):
        names = {f"RIOP_{code.name}": int(code) for code in Code}
        self.assertEqual(names, {name: code for code, name in riopipe._riopipe.CODES})
        self.assertEqual(riopipe.Error(10_000, "of a later version").code, Code.OTHER)

    def test_the_example_of_the_page_runs(self):
        folder = pathlib.Path(__file__).parent
        page = (folder / "../../../docs/python.md").read_text()
        shown = page.split("```python\n")[1].split("```")[0]
        example = (folder / "example.py").read_text()
        self.assertEqual(example[example.index("def main"):example.index('\n\nif __name__')].strip(), shown.strip())
        site = Site().started()
        self.addCleanup(site.close)
        riopipe.create("logs", site.members)
        done = subprocess.run(
            [sys.executable, folder / "example.py", "logs", *site.members], capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.endswith("durable up to group 2\nread back: rc\n"), done.stdout)


if __name__ == "__main__":
    unittest.main()

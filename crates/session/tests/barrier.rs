//! The shared state of the streams of a volume, under a model checker: every interleaving, and
//! every value that the memory model lets a load return. The file under test is compiled as it is,
//! with the checker's atomics.

extern crate alloc;

#[allow(unreachable_pub)]
#[path = "../src/initiator/stream/barrier.rs"]
mod barrier;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

use alloc::sync::Arc;
use barrier::{FlushFailures, ReadBarrier};
use loom::cell::UnsafeCell;
use loom::thread;
use riopipe_order::attribute::Member;

/// Every stream receives a failed FLUSH once, at any time it reads (T22).
#[test]
fn t22_a_failed_flush_reaches_every_stream_once() {
    loom::model(|| {
        let failures = FlushFailures::new(2);
        let mut seen = failures.all_handled();
        let others: Vec<_> = (0..2)
            .map(|member| {
                let failures = Arc::clone(&failures);
                thread::spawn(move || failures.record(Member(member)))
            })
            .collect();
        let mut reported = Vec::new();
        failures.for_each_new(&mut seen, |member| reported.push(member.0));
        for other in others {
            other.join().unwrap();
        }
        failures.for_each_new(&mut seen, |member| reported.push(member.0));
        reported.sort_unstable();
        assert_eq!(reported, [0, 1]);
        failures.for_each_new(&mut seen, |member| panic!("reported again: {member:?}"));
    });
}

/// A stream that is behind fails, and leaves. Reads do not wait for it any more, and can notice that (P9).
#[test]
fn p9_a_stream_that_has_failed_leaves_and_is_noticed() {
    loom::model(|| {
        let barrier = ReadBarrier::new(1);
        let mut participants = [barrier.participant(0), barrier.participant(0)];
        for participant in &mut participants {
            participant.set_bound(1);
        }
        let [mut failing, mut reader] = participants;
        reader.set_up_to_date();
        assert!(!reader.begin_read() && !barrier.has_failed_stream());
        failing.leave_failed();
        assert!(reader.begin_read() && barrier.has_failed_stream());
    });
}

/// While one stream replays to a server, no stream reads there: neither a read that began before,
/// nor one that begins meanwhile (P9).
#[test]
fn p9_no_read_meets_a_replay() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let barrier = ReadBarrier::new(1);
        // The content of the server. A replay puts older content there for a moment.
        let shown = loom::sync::Arc::new(UnsafeCell::new(0));
        let mut participants = [barrier.participant(0), barrier.participant(0)];
        for participant in &mut participants {
            participant.set_bound(1);
            participant.set_up_to_date();
        }
        let [mut writer, mut reader] = participants;
        let reads = {
            let shown = loom::sync::Arc::clone(&shown);
            thread::spawn(move || {
                for _ in 0..2 {
                    if reader.begin_read() {
                        // SAFETY: no replay is running. The checker fails if that is not so.
                        shown.with(|value| unsafe { assert!([0, 2].contains(&*value)) });
                        reader.end_read();
                    }
                }
                reader
            })
        };
        // The connection breaks, but the target still lives.
        writer.set_behind();
        writer.set_bound(1);
        while !writer.has_no_reads() {
            thread::yield_now();
        }
        // SAFETY: no read is in flight. The checker fails if that is not so.
        shown.with_mut(|value| unsafe { *value += 2 });
        writer.set_up_to_date();
        let reader = reads.join().unwrap();
        assert!(barrier.readable(0), "nothing is left to wait for");
        drop((writer, reader));
        assert!(barrier.readable(0), "a stream that has left keeps no other waiting");
    });
}

/// In a new incarnation of the target no stream reads before every stream has replayed to it.
#[test]
fn p9_after_a_restart_all_streams_come_first() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let barrier = ReadBarrier::new(1);
        let mut participants = [barrier.participant(0), barrier.participant(0)];
        for participant in &mut participants {
            participant.set_bound(1);
            participant.set_up_to_date();
        }
        let back: Vec<_> = participants
            .into_iter()
            .map(|mut participant| {
                thread::spawn(move || {
                    participant.set_behind();
                    participant.set_bound(2);
                    let readable = participant.begin_read();
                    assert!(!readable, "this stream has not replayed yet");
                    participant.set_up_to_date();
                    participant
                })
            })
            .collect();
        let back: Vec<_> =
            back.into_iter().map(|participant| participant.join().unwrap()).collect();
        assert!(barrier.readable(0));
        drop(back);
    });
}

/// A reader that is bound to no stream learns of the target's new incarnation when it connects. It
/// reads nothing before the stream has replayed, whether the stream has noticed the end of the old
/// incarnation or not.
#[test]
fn p9_a_reader_that_comes_back_first_waits_for_the_streams() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let barrier = ReadBarrier::new(1);
        let replayed = loom::sync::Arc::new(UnsafeCell::new(false));
        let mut stream = barrier.participant(0);
        stream.set_bound(1);
        stream.set_up_to_date();
        let mut reader = barrier.participant(0);
        let reads = {
            let replayed = loom::sync::Arc::clone(&replayed);
            thread::spawn(move || {
                reader.note_incarnation(2);
                if reader.begin_read() {
                    // SAFETY: the stream is up to date, and so writes to it no more.
                    replayed.with(|replayed| assert!(unsafe { *replayed }));
                    reader.end_read();
                }
                reader.note_incarnation(1);
                reader
            })
        };
        stream.set_behind();
        stream.set_bound(2);
        while !stream.has_no_reads() {
            thread::yield_now();
        }
        // SAFETY: no stream reads it before this stream is up to date.
        replayed.with_mut(|replayed| unsafe { *replayed = true });
        stream.set_up_to_date();
        let reader = reads.join().unwrap();
        assert!(barrier.readable(0), "old news change nothing");
        drop((stream, reader));
    });
}

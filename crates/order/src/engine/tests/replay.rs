//! Replay after a lost connection, trap by trap.

use super::*;

fn no_merge() -> Limits {
    Limits { merge: false, ..Limits::default() }
}

/// The attribute and payload of a request, without the ordinal of its binding.
fn shape(engine: &dyn Engine<Piece>, d: Dispatch) -> (Attribute, Vec<Piece>) {
    let request = engine.request(d.id);
    (request.attribute(0), request.pieces.clone())
}

fn seqs(engine: &dyn Engine<Piece>, sent: &[Dispatch]) -> Vec<u64> {
    sent.iter().map(|d| engine.request(d.id).seq.0).collect()
}

fn end(engine: &mut dyn Engine<Piece>, sent: &[Dispatch]) {
    for d in sent {
        engine.on_request_done(d.id, Ok(()));
    }
}

#[test]
fn p7_everything_is_sent_again_in_order_and_as_it_was_before_anything_new() {
    // One server with a volatile drive and one without.
    let mut engine = rio::Rio::new(topology(&[true, false], 2, 64, 4), Limits::default());
    let in_place = Write { op: Op::Write(Place::InPlace, Piece(9, 1)), ..write(9, 1) };
    engine.admit(&mut [write(0, 1)], 1, false).unwrap();
    engine.admit(&mut [write(1, 1)], 2, false).unwrap(); // merged into the first
    engine.admit(&mut [write(16, 12), in_place], 3, false).unwrap(); // split
    engine.admit(&mut [Write { lba: 44, blocks: 2, op: Op::Discard }], 4, true).unwrap();
    let sent = drain(&mut engine, 1);
    assert_eq!(sent.len(), 7, "merged, three parts, in place, discard, flush elsewhere");
    let before: Vec<_> = sent.iter().map(|d| shape(&engine, *d)).collect();
    engine.on_request_done(sent[2].id, Ok(()));
    engine.admit(&mut [write(60, 1)], 5, false).unwrap(); // never sent

    assert!(engine.suspend(0));
    engine.admit(&mut [write(70, 1)], 6, false).unwrap();
    assert_eq!(engine.next_request(0), None, "there is no connection");

    let mut asked = vec![];
    engine.resume(0, &mut |seq, index| {
        asked.push((seq, index));
        false
    });
    assert_eq!(asked, before.iter().map(|(a, _)| (a.seq, a.index)).collect::<Vec<_>>());
    assert!(engine.is_replaying(0));
    assert_eq!(engine.replayed_count(), 7, "the report counts requests");
    let again = drain(&mut engine, 1);
    let after: Vec<_> = again.iter().map(|d| shape(&engine, *d)).collect();
    assert_eq!(after[..7], before);
    assert_eq!(seqs(&engine, &again[7..]), [5, 6], "and only then what is new");
    let ordinals: Vec<_> = again.iter().map(|d| d.ordered.unwrap().ordinal).collect();
    assert_eq!(ordinals, (1..=9).collect::<Vec<_>>(), "dense from 1 (T5)");
    end(&mut engine, &again);
    assert!(!engine.is_replaying(0) && engine.is_idle());
    assert_eq!(engine.poll().complete, Seq(6));
    assert_eq!(engine.replayed_count(), 7, "what is new was not sent again");
}

#[test]
fn p7_what_the_log_shows_durable_is_done_and_not_sent_again() {
    let mut engine = rio::Rio::new(topology(&[false], 1, 64, 64), no_merge());
    for lba in [0, 0, 9] {
        // The second overwrites the first: sent again, the first would bring old content back.
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    let sent = drain(&mut engine, 1);
    engine.on_request_done(sent[1].id, Ok(()));
    assert_eq!(engine.poll().complete, Seq(0));
    engine.suspend(0);
    engine.resume(0, &mut |seq, _| seq <= Seq(2));
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(2) }, "by the log");
    let again = drain(&mut engine, 1);
    assert_eq!(seqs(&engine, &again), [3]);
    end(&mut engine, &again);
    assert_eq!(engine.poll().durable, Seq(3));
}

#[test]
fn t4_what_is_complete_but_not_durable_is_sent_again_and_counts_once() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), no_merge());
    engine.admit(&mut [write(0, 1), write(9, 1)], 0, false).unwrap();
    let sent = drain(&mut engine, 1);
    engine.on_request_done(sent[0].id, Ok(()));
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    let again = drain(&mut engine, 1);
    assert_eq!(again.len(), 2, "also the one that is complete");
    engine.on_request_done(again[0].id, Ok(()));
    assert_eq!(engine.poll().complete, Seq(0), "the other entry of the group is still out (T6)");
    engine.on_request_done(again[1].id, Ok(()));
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
    assert!(engine.is_idle());

    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    let again = drain(&mut engine, 1);
    assert_eq!(again.len(), 2, "as long as it is not durable");
    assert!(!engine.is_idle());
    end(&mut engine, &again);
    assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
    engine.ask_durable(Seq(1));
    let flush = drain(&mut engine, 1);
    end(&mut engine, &flush);
    assert_eq!(engine.poll().durable, Seq(2));
}

#[test]
fn t4_a_joint_flush_covers_a_crashed_server_only_with_its_own_flush_there() {
    // Two servers with a volatile drive each.
    for flushed_there in [false, true] {
        let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), no_merge());
        engine.admit(&mut [write(0, 1)], 0, false).unwrap(); // server 0
        engine.admit(&mut [write(4, 1)], 0, true).unwrap(); // server 1, durable; flush entry on 0
        let sent = drain(&mut engine, 2);
        engine.on_request_done(sent[0].id, Ok(()));
        engine.on_request_done(sent[2].id, Ok(()));
        assert_eq!(engine.poll(), Marks { complete: Seq(1), durable: Seq(0) });
        engine.suspend(0);
        engine.resume(0, &mut |_, _| flushed_there);
        if flushed_there {
            assert_eq!(engine.poll().durable, Seq(2), "the log shows what no answer did");
            assert!(drain(&mut engine, 2).is_empty());
            continue;
        }
        let again = drain(&mut engine, 2);
        assert_eq!(seqs(&engine, &again), [1, 2], "the write, and the flush behind it");
        engine.on_request_done(again[0].id, Ok(()));
        assert_eq!(engine.poll().durable, Seq(0));
        engine.on_request_done(again[1].id, Ok(()));
        assert_eq!(engine.poll().durable, Seq(2));
    }
}

#[test]
fn t4_nothing_becomes_durable_or_released_over_what_is_being_replayed() {
    // A log that hides a flush entry which it had confirmed: there is none, but even then.
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 2);
    end(&mut engine, &sent[..2]); // all of server 0
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    engine.on_request_done(sent[2].id, Ok(()));
    assert_eq!(engine.poll(), Marks { complete: Seq(2), durable: Seq(0) });
    let again = drain(&mut engine, 2);
    engine.on_request_done(again[0].id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(0), "group 1 is written again, and not flushed");
    assert_eq!(engine.payload_freed_up_to(), Seq(0));
    engine.on_request_done(again[1].id, Ok(()));
    assert_eq!(engine.poll().durable, Seq(2));

    // And if the mark had been reported durable before, it is at least not released.
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [], 0, true).unwrap();
    let sent = drain(&mut engine, 1);
    end(&mut engine, &sent);
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    engine.poll();
    let again = drain(&mut engine, 1);
    assert_eq!((seqs(&engine, &again), engine.released()), (vec![1, 2], Seq(0)));
    engine.on_request_done(again[0].id, Ok(()));
    engine.poll();
    assert_eq!((engine.released(), engine.payload_freed_up_to()), (Seq(0), Seq(0)));
    engine.on_request_done(again[1].id, Ok(()));
    engine.poll();
    assert_eq!((engine.released(), engine.payload_freed_up_to()), (Seq(2), Seq(2)));

    // The oldest replay of all servers is the bound.
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    let sent = drain(&mut engine, 2);
    end(&mut engine, &sent);
    for server in 0..2 {
        engine.suspend(server);
        engine.resume(server, &mut |_, _| false);
    }
    engine.poll();
    assert_eq!(engine.released(), Seq(0));
}

#[test]
fn t1_what_the_mark_has_released_is_not_sent_again() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), no_merge());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    end_all(&mut engine);
    engine.poll();
    engine.admit(&mut [write(9, 1)], 0, true).unwrap();
    end_all(&mut engine);
    engine.admit(&mut [write(20, 1)], 0, false).unwrap();
    let third = drain(&mut engine, 1);
    assert_eq!(third[0].ordered.unwrap().released, Seq(1), "the server's log forgets group 1 now");
    engine.suspend(0);
    let mut asked = vec![];
    engine.resume(0, &mut |seq, _| {
        asked.push(seq.0);
        seq == Seq(2)
    });
    assert_eq!(asked, [2, 3], "absent there does not mean lost");
    let again = drain(&mut engine, 1);
    assert_eq!(seqs(&engine, &again), [3]);
}

fn end_all(engine: &mut dyn Engine<Piece>) {
    let sent = drain(engine, 1);
    end(engine, &sent);
}

#[test]
fn p7_a_crash_during_replay_starts_it_again() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), no_merge());
    for lba in [0, 9, 20] {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    drain(&mut engine, 1);
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    let first = engine.next_request(0).unwrap();
    engine.next_request(0).unwrap();
    engine.on_request_done(first.id, Ok(()));
    engine.suspend(0);
    assert_eq!(engine.next_request(0), None, "also what is still queued for replay");
    assert!(engine.is_replaying(0), "what was not put back is not there yet (P9)");
    engine.suspend(0);
    engine.resume(0, &mut |seq, _| seq == Seq(2));
    let again = drain(&mut engine, 1);
    assert_eq!(seqs(&engine, &again), [1, 3]);
    assert_eq!(again[0].ordered.unwrap().ordinal, 1);
    end(&mut engine, &again);
    assert_eq!(engine.poll().complete, Seq(3));
    assert!(!engine.is_replaying(0));
}

#[test]
fn p7_other_servers_go_on_meanwhile() {
    let mut engine = rio::Rio::new(topology(&[false, false], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.suspend(0);
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    engine.admit(&mut [write(5, 1), write(1, 1)], 0, false).unwrap();
    let sent = drain(&mut engine, 2);
    assert_eq!(seqs(&engine, &sent), [2, 3]);
    assert!(!engine.is_replaying(0) && !engine.is_replaying(1));
    end(&mut engine, &sent);
    engine.resume(0, &mut |_, _| panic!("nothing was sent there"));
    let sent = drain(&mut engine, 2);
    assert_eq!(seqs(&engine, &sent), [1, 3]);
    end(&mut engine, &sent);
    assert_eq!(engine.poll().durable, Seq(3));
}

#[test]
fn t13_replay_takes_no_credits_and_a_full_log_is_replayed() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 9, 64), no_merge());
    let mut admitted = 0;
    while engine.admit(&mut [write(admitted * 2, 1)], 0, false).is_ok() {
        admitted += 1;
    }
    let sent = drain(&mut engine, 1);
    for round in 0..3 {
        engine.suspend(0);
        engine.resume(0, &mut |_, _| false);
        let again = drain(&mut engine, 1);
        assert_eq!(again.len(), sent.len());
        let full = engine.admit(&mut [write(0, 1)], 0, false);
        assert_eq!(full, Err(Refusal::Full(Bound::Log { server: 0 })), "round {round}");
        if round == 2 {
            end(&mut engine, &again);
        }
    }
    engine.poll();
    assert!(engine.admit(&mut [write(0, 1)], 0, false).is_ok(), "no credit was lost either");
}

#[test]
fn t14_what_is_complete_stays_until_it_is_released() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), no_merge());
    engine.admit(&mut [write(0, 2)], 0, false).unwrap();
    end_all(&mut engine);
    engine.poll();
    engine.admit(&mut [write(9, 1)], 0, true).unwrap();
    let sent = drain(&mut engine, 1);
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    let again = drain(&mut engine, 1);
    assert_eq!(engine.request(again[0].id).pieces, [Piece(0, 2)], "its bytes are still there");
    assert_eq!(again[1].id, sent[0].id);
    end(&mut engine, &again);
    engine.suspend(0);
    engine.poll();
    engine.resume(0, &mut |_, _| panic!("all is released"));
    assert!(drain(&mut engine, 1).is_empty());
}

#[test]
fn t14_complete_requests_without_payload_are_bounded_too() {
    let topology = topology(&[true], 1, 1 << 20, 64);
    let mut engine = rio::Rio::<Piece>::new(topology, no_merge());
    let group: Vec<_> = (0..4).map(|n| Write { lba: n * 2, blocks: 1, op: Op::Discard }).collect();
    let mut admitted = 0;
    while admitted < 60_000 && engine.admit(&mut group.clone(), 0, false).is_ok() {
        admitted += 1;
        end_all(&mut engine);
        engine.poll();
    }
    assert!(admitted <= 1 << 15, "{admitted} groups of four kept for replay");
    end_all(&mut engine); // the flush that the refusal has put in
    engine.poll();
    assert!(engine.admit(&mut group.clone(), 0, false).is_ok(), "P8");
}

#[test]
fn p6_a_failed_replay_poisons_and_nothing_more_is_sent_again() {
    let mut engine = rio::Rio::new(topology(&[true], 1, 64, 64), no_merge());
    for lba in [0, 9, 20] {
        engine.admit(&mut [write(lba, 1)], 0, false).unwrap();
    }
    end_all(&mut engine);
    assert_eq!(engine.poll().complete, Seq(3));
    engine.admit(&mut [write(40, 1)], 0, true).unwrap();
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    let (one, two) = (engine.next_request(0).unwrap(), engine.next_request(0).unwrap());
    engine.on_request_done(two.id, Err(Cause::Status(0x280)));
    assert_eq!(engine.failure().unwrap().seq, Seq(2), "complete before, and yet lost");
    assert_eq!(engine.next_request(0), None);
    engine.on_request_done(one.id, Ok(()));
    assert_eq!(engine.poll(), Marks { complete: Seq(3), durable: Seq(0) }, "marks never go back");
    assert_eq!(engine.released(), Seq(0));
    assert!(!engine.is_replaying(0) && engine.is_idle());
    assert!(!engine.suspend(0), "nothing to wait for");
}

#[test]
fn p6_poison_during_suspension_ends_it() {
    let failure =
        Failure { seq: Seq(1), member: Member(0), flush: false, cause: Cause::Disconnected };
    let mut engine = rio::Rio::new(topology(&[true, false], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    end_all(&mut engine);
    engine.admit(&mut [write(1, 1), write(4, 1)], 0, false).unwrap();
    drain(&mut engine, 2);
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    engine.next_request(0).unwrap();
    engine.suspend(0);
    engine.admit(&mut [write(2, 1)], 0, false).unwrap();
    engine.poison(failure);
    assert_eq!(engine.admit(&mut [write(2, 1)], 0, false), Err(Refusal::Poisoned(failure)));
    assert!(!engine.is_replaying(0), "it waits for nothing any more");
    engine.resume(0, &mut |_, _| panic!("a stream that has failed asks nothing"));
    assert!(drain(&mut engine, 2).is_empty());
}

#[test]
fn p6_what_a_replay_was_to_put_back_is_not_released_by_a_failure_elsewhere() {
    // As if the log had hidden what it confirmed; see `t4_nothing_becomes_durable…`.
    let mut engine = rio::Rio::new(topology(&[true, false], 1, 64, 4), no_merge());
    engine.admit(&mut [write(0, 1)], 0, true).unwrap();
    end_all(&mut engine);
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    let elsewhere = drain(&mut engine, 2);
    engine.suspend(0);
    engine.resume(0, &mut |_, _| false);
    engine.on_request_done(elsewhere[0].id, Err(Cause::Status(0x280)));
    engine.poll();
    assert!(!engine.is_replaying(0), "it is not sent again");
    assert_eq!(engine.released(), Seq(0));
}

#[test]
fn p9_incomplete_writes_are_pending_wherever_they_are() {
    let mut engine = rio::Rio::new(topology(&[true, false], 1, 64, 4), no_merge());
    let pending = |engine: &rio::Rio<Piece>, lba| engine.has_pending_write(lba, 1);
    engine.admit(&mut [write(0, 1)], 0, false).unwrap();
    engine.admit(&mut [write(4, 1)], 0, false).unwrap();
    assert!(pending(&engine, 0) && pending(&engine, 4), "queued");
    let sent = drain(&mut engine, 2);
    engine.admit(&mut [write(2, 1)], 0, false).unwrap();
    assert!(pending(&engine, 0) && pending(&engine, 4) && pending(&engine, 2), "out, queued");
    engine.on_request_done(sent[0].id, Ok(()));
    assert!(!pending(&engine, 0) && pending(&engine, 4) && !pending(&engine, 1));
    engine.suspend(0);
    assert!(!pending(&engine, 0), "complete stays complete");
    engine.resume(0, &mut |_, _| false);
    assert!(
        !pending(&engine, 0) && engine.is_replaying(0),
        "its replay holds it up, and shows that"
    );
    let again = drain(&mut engine, 1);
    assert!(pending(&engine, 2));
    end(&mut engine, &again);
    assert!(!pending(&engine, 2) && pending(&engine, 4));
    engine.on_request_done(sent[1].id, Ok(()));
    assert!(!pending(&engine, 4));
}

#[test]
fn p7_engines_that_keep_nothing_cannot_replay() {
    for kind in [EngineKind::None, EngineKind::Sync] {
        let mut engine = engine::<Piece>(kind, topology(&[true], 1, 64, 64), no_merge());
        engine.admit(&mut [write(0, 1)], 0, false).unwrap();
        assert!(!engine.suspend(0), "{kind}");
        assert_eq!(drain(&mut *engine, 1).len(), 1, "nothing has changed");
    }
}

#[test]
fn t14_what_was_sent_and_may_be_again_is_listed_in_its_order() {
    let mut engine = rio::Rio::new(topology(&[true, true], 1, 64, 4), no_merge());
    for lba in [0, 1, 4, 2] {
        engine.admit(&mut [write(lba, 1)], lba, false).unwrap();
    }
    let sent = drain(&mut engine, 1);
    engine.on_request_done(sent[1].id, Ok(()));
    engine.admit(&mut [write(3, 1)], 3, false).unwrap(); // never sent
    let mut seen = vec![];
    engine.visit_sent(0, &mut |attribute| seen.push((attribute.seq.0, attribute.lba - 8)));
    assert_eq!(seen, [(1, 0), (2, 1), (4, 2)], "also what has ended, and is not released");
    engine.visit_sent(1, &mut |attribute| panic!("{attribute:?} was not sent"));
}

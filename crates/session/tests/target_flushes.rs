//! FLUSHes of one drive on several connections, that is, on several cores, whose ends are received
//! in any order (T29).

mod world;

use riopipe_session::wire::Claim;
use riopipe_testkit::peer;
use world::recovery::{RIVAL, RIVAL_ID};
use world::{Owner, World, attribute, block, flush_entry, ordered};

/// Two streams and a plain queue, each with an unflushed write to the drive.
struct Three {
    w: World,
    owner: Owner,
    queues: [usize; 3],
}

/// The possible answers to each of the three: good, or refused.
const GOOD: u16 = 0;

fn three() -> Three {
    let mut w = World::new(&[true, true]);
    let owner = w.owner();
    let (second, plain) = (w.io(owner.cntlid, 2), w.io(owner.cntlid, 3));
    assert_eq!(w.bind(second, 1, 1, 0).status, 0);
    let queues = [owner.io, second, plain];
    for (stream, queue) in [owner.io, second].into_iter().enumerate() {
        let write = ordered(1, &attribute(1, 1 + stream as u64), 0);
        assert_eq!(w.call(queue, write, &block(1)).status, 0);
    }
    assert_eq!(w.call(plain, peer::write(1, 1, 50, 1), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.host.drives[1].holds = true;
    Three { w, owner, queues }
}

impl Three {
    /// A FLUSH succeeds while another of the drive is there. Another host takes the volume over, and
    /// has it as soon as the other FLUSH is back.
    fn taken_over_in_doubt(&mut self) {
        self.back(0, true);
        assert_eq!(self.answer(0), None, "the other may have failed");
        let (rival, _) = self.w.admin_as(RIVAL, RIVAL_ID, 0);
        let take = Claim { take_over: true, ..self.w.next_claim(2) };
        assert_eq!(self.w.claim(rival, &take), None, "the other's FLUSH is still at the drive");
        self.back(2, true);
        assert_eq!(self.w.next(rival).map(|pdu| pdu.completion().status), Some(GOOD));
    }

    /// A FLUSH of the drive by one of them.
    fn flush(&mut self, at: usize, cid: u16) {
        let sqe = match at {
            2 => peer::flush(cid, 1),
            _ => ordered(cid, &flush_entry(u64::from(cid), 0), 0),
        };
        self.w.command(self.queues[at], sqe, &[]);
    }

    /// The drive's FLUSH for one of them has come back.
    fn back(&mut self, at: usize, ok: bool) {
        let queue = self.queues[at] as u64;
        let mut pending = self.w.host.drives[0].pending.iter();
        let at = pending.position(|pending| pending.op.key() == queue).expect("a FLUSH in flight");
        if ok { self.w.complete(0, at) } else { self.w.fail(0, at) }
    }

    fn answer(&mut self, at: usize) -> Option<u16> {
        self.w.next(self.queues[at]).map(|pdu| pdu.completion().status)
    }
}

/// All orders of three.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

#[test]
fn t29_a_flush_that_fails_counts_for_all_that_were_in_flight_with_it() {
    for begun in ORDERS {
        for received in ORDERS {
            for failing in [None, Some(0), Some(1), Some(2)] {
                for late_mail in [false, true] {
                    let case = format!("{begun:?} {received:?} {failing:?} late: {late_mail}");
                    let mut t = three();
                    begun.into_iter().for_each(|at| t.flush(at, 2));
                    t.w.hold_mail = late_mail;
                    let (mut failed, mut last) = (false, 0);
                    for at in received {
                        t.back(at, failing != Some(at));
                        failed |= failing == Some(at);
                        let answered = t.answer(at);
                        // No host may receive a success while a failure may not have been received.
                        if !failed && at != received[2] {
                            assert_eq!(answered, None, "{case}: {at} answered too early");
                        }
                        last = at;
                        // The answer itself is checked again below.
                        if let Some(status) = answered {
                            assert_eq!(status == GOOD, failing.is_none(), "{case}: {at}");
                            t.queues[at] = usize::MAX;
                        }
                    }
                    assert_eq!(t.queues[last], usize::MAX, "{case}: the last one has no doubt");
                    t.w.hold_mail = false;
                    t.w.deliver();
                    for at in 0..3 {
                        if t.queues[at] == usize::MAX {
                            continue;
                        }
                        let status = t.answer(at).unwrap_or_else(|| panic!("{case}: {at} waits"));
                        assert_eq!(status == GOOD, failing.is_none(), "{case}: {at}");
                    }
                }
            }
        }
    }
}

#[test]
fn t29_what_is_in_doubt_is_not_called_durable() {
    let mut t = three();
    t.flush(0, 2);
    t.flush(1, 2);
    t.back(0, true);
    let persisted =
        |t: &Three| t.w.scan(0, 0).entries.iter().map(|e| e.persisted).collect::<Vec<_>>();
    assert_eq!(persisted(&t), [false, false], "its persist word shows more than is known");
    t.back(1, true);
    assert_eq!(t.answer(0), Some(GOOD));
    assert_eq!(persisted(&t), [false, true]);
}

#[test]
fn t29_flushes_without_end_keep_none_in_doubt() {
    let mut t = three();
    t.flush(0, 2);
    t.flush(1, 2);
    t.back(0, true);
    assert_eq!(t.answer(0), None, "the other may have failed");
    // Before that one ends, the next begins.
    t.flush(2, 2);
    t.back(1, true);
    assert_eq!(t.answer(0), Some(GOOD), "all that were in flight then have ended");
    assert_eq!(t.answer(1), None, "the next may have failed");
    t.flush(0, 3);
    t.back(2, true);
    assert_eq!(t.answer(1), Some(GOOD));
    assert_eq!(t.answer(2), None);
    t.back(0, true);
    assert_eq!([t.answer(2), t.answer(0)], [Some(GOOD); 2]);
}

#[test]
fn t29_other_drives_and_protected_ones_raise_no_doubt() {
    let mut t = three();
    // The second stream flushes the other drive.
    t.w.command(t.queues[1], ordered(2, &flush_entry(2, 1), 0), &[]);
    t.flush(0, 2);
    t.back(0, true);
    assert_eq!(t.answer(0), Some(GOOD));

    let mut w = World::new(&[false]);
    let Owner { cntlid, .. } = w.owner();
    let [one, other] = [w.io(cntlid, 2), w.io(cntlid, 3)];
    w.host.drives[0].holds = true;
    w.command(one, peer::flush(1, 1), &[]);
    w.command(other, peer::flush(1, 1), &[]);
    w.complete(0, 0);
    assert_eq!(w.next(one).map(|pdu| pdu.completion().status), Some(GOOD));
}

#[test]
fn t29_a_connection_that_ends_in_doubt_keeps_no_other_and_comes_back() {
    let mut t = three();
    t.flush(0, 2);
    t.flush(1, 2);
    t.back(0, true);
    // Its connection breaks: nothing of it is at the drives, so it ends at once.
    t.w.hang_up(t.queues[0]);
    assert!(t.w.links[t.queues[0]].conn.is_drained());
    let again = t.w.io(t.owner.cntlid, 4);
    assert_eq!(t.w.bind_again(again, 0, 1, 0).status, 0);
    t.back(1, true);
    assert_eq!(t.answer(1), Some(GOOD));
    assert!(!t.w.scan(0, 0).entries[0].persisted, "its first write was not flushed for sure");
}

#[test]
fn t29_a_connection_that_ends_in_doubt_leaves_the_others_their_answers() {
    let mut t = three();
    (0..3).for_each(|at| t.flush(at, 2));
    t.back(0, true);
    t.back(1, true);
    t.w.hang_up(t.queues[0]);
    assert_eq!(t.answer(1), None, "the last one may have failed");
    t.back(2, true);
    assert_eq!([t.answer(1), t.answer(2)], [Some(GOOD); 2]);
}

/// The stream goes to its next owner while a FLUSH in doubt covers two of its requests.
#[test]
fn p8_every_request_that_a_flush_in_doubt_covers_is_answered() {
    let mut t = three();
    t.flush(0, 2);
    // These two wait for the FLUSH of the first, and share the next one.
    t.flush(0, 3);
    t.flush(0, 4);
    t.back(0, true);
    assert_eq!(t.answer(0), Some(GOOD));
    t.flush(2, 2);
    t.taken_over_in_doubt();
    for _ in 0..2 {
        let status = t.answer(0).expect("an answer");
        assert_ne!(status, GOOD, "it is not the owner any more");
    }
}

#[test]
fn t29_a_new_owner_does_not_wait_for_doubts() {
    let mut t = three();
    t.flush(0, 2);
    t.flush(2, 2);
    t.taken_over_in_doubt();
    let status = t.answer(0).expect("an answer");
    assert_ne!(status, GOOD, "it is not the owner any more");
    assert!(t.w.scan(0, 0).entries.iter().all(|entry| !entry.persisted));
}

#[test]
fn t29_a_failure_is_certain_while_others_are_in_flight() {
    for failing in 0..3 {
        let mut t = three();
        (0..3).for_each(|at| t.flush(at, 2));
        t.back(failing, false);
        let status = t.answer(failing).expect("nothing is in doubt about a failure");
        assert_ne!(status, GOOD, "{failing}");
    }
}

#[test]
fn t29_a_connection_that_has_ended_does_not_wait_for_the_flushes_of_others() {
    let mut t = three();
    t.flush(0, 2);
    t.flush(1, 2);
    t.w.hang_up(t.queues[0]);
    assert!(!t.w.links[t.queues[0]].conn.is_drained(), "its FLUSH is at the drive");
    t.back(0, true);
    assert!(t.w.links[t.queues[0]].conn.is_drained());
}

/// The connection carries another stream when the doubt is resolved. The gate of that stream does
/// not know the request.
#[test]
fn t29_a_doubt_of_a_stream_that_has_ended_does_not_touch_the_next_one() {
    let mut w = World::new(&[true]);
    let Owner { admin, cntlid, io } = w.owner();
    // It writes nothing, so no claim waits for it.
    let plain = w.io(cntlid, 2);
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
    w.host.drives[0].holds = true;
    w.command(io, ordered(2, &flush_entry(2, 0), 0), &[]);
    w.command(plain, peer::flush(1, 1), &[]);
    w.complete(0, 0);
    assert_eq!(w.next(io), None, "the other may have failed");
    let again = w.next_claim(2);
    assert_eq!(w.claim(admin, &again).map(|done| done.status), Some(GOOD));
    assert_eq!(w.settle(admin, 2, &[(0, 0, false), (1, 0, false)]), GOOD);
    assert_eq!(w.bind(io, 0, 2, 0).status, GOOD);
    w.complete(0, 0);
    let answer = w.next(io).expect("an answer").completion();
    assert_eq!((answer.cid, answer.status), (2, 0x702), "its stream is over");
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, GOOD);
}

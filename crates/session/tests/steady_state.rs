//! Submitting, sending and completing allocate nothing once the connection is warm: in capsules, on
//! request (R2T), reads; with digests and without; and so does an ordered stream, also after a
//! connection was lost and replaced.

mod stream_rig;

use riopipe_testkit::{Counting, allocations, peer};
use std::sync::Arc;

use riopipe_nvme::command::Sqe;
use riopipe_nvme::digest::soft;
use riopipe_session::initiator::queue_pair::{Data, Event, QpConfig, QueuePair};
use riopipe_session::outbox::Outbox;
use riopipe_session::stages::Stages;

use stream_rig::{Rig, Shape, log, write};

#[global_allocator]
static COUNTING: Counting = Counting;

const DEPTH: usize = 32;

/// Gives a PDU without data its header digest.
fn sealed(mut pdu: Vec<u8>, digests: bool) -> Vec<u8> {
    if digests {
        pdu[1] |= 1;
        pdu[4] += 4;
        let digest = soft(0, &pdu);
        pdu.extend(digest.to_le_bytes());
    }
    pdu
}

fn response(cid: u16) -> Vec<u8> {
    let mut pdu = vec![5, 0, 24, 0, 24, 0, 0, 0];
    pdu.resize(24, 0);
    pdu[20..22].copy_from_slice(&cid.to_le_bytes());
    pdu
}

fn allocations_per_warm_round(digests: bool, in_capsule: u32, read: bool) -> u64 {
    let mut config = QpConfig::admin(
        "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        [7; 16],
        "nqn.2026-01.io.example:drives".into(),
        soft,
    );
    config.sqsize = DEPTH as u16 + 1;
    config.header_digest = digests;
    config.data_digest = digests;
    let mut qp: QueuePair<Arc<[u8]>> = QueuePair::new(config);
    let mut out = Outbox::new();
    qp.start(&mut out);
    let mut icresp = vec![0; 128];
    icresp[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
    icresp[11] = if digests { 3 } else { 0 };
    icresp[13] = 0x10;
    // Cleared is as good as sent.
    out.clear();
    qp.receive(&icresp, &mut out, |_| ()).unwrap();
    out.clear();
    qp.receive(&sealed(response(0), digests), &mut out, |_| ()).unwrap();
    qp.set_in_capsule(in_capsule);

    let payload: Arc<[u8]> = vec![1; 4096].into();
    let pieces = [payload.clone(), payload];
    let mut cids = Vec::with_capacity(DEPTH);
    let mut least = u64::MAX;
    for _ in 0..50 {
        cids.clear();
        let before = allocations();
        while qp.space() > 0 {
            let (sqe, data) = if read {
                (Sqe::read(1, 0, 2), Data::Read(8192))
            } else {
                (Sqe::write(1, 0, 2), Data::Write(&pieces))
            };
            cids.push(qp.submit(sqe, 0, data, &mut out).unwrap().0);
        }
        let submitting = allocations() - before;

        // The target's bytes are made outside the count: its requests for data, then its answers.
        let (mut asks, mut answer) = (Vec::new(), Vec::new());
        for &cid in &cids {
            if read {
                let mut pdu = vec![7, 12, 24, 24, 24, 0x20, 0, 0];
                pdu.extend(cid.to_le_bytes());
                pdu.extend([0; 6]);
                pdu.extend(8192u32.to_le_bytes());
                pdu.extend([0; 4]);
                if digests {
                    pdu[1] |= 3;
                    pdu[3] = 28;
                    pdu[4] = 32;
                    let digest = soft(0, &pdu);
                    pdu.extend(digest.to_le_bytes());
                }
                pdu.extend([9; 8192]);
                if digests {
                    pdu.extend(soft(0, &[9; 8192]).to_le_bytes());
                }
                answer.extend(pdu);
                continue;
            }
            if in_capsule == 0 {
                let mut pdu = vec![9, 0, 24, 0, 24, 0, 0, 0];
                pdu.extend(cid.to_le_bytes());
                pdu.extend([0; 6]);
                pdu.extend(8192u32.to_le_bytes());
                pdu.extend([0; 4]);
                asks.extend(sealed(pdu, digests));
            }
            answer.extend(sealed(response(cid), digests));
        }
        let mut done = 0;
        let before = allocations();
        let mut used = 0;
        for answered in [&asks, &answer] {
            out.consume(out.len_bytes());
            let taken = qp.receive(answered, &mut out, |event| {
                done += u32::from(matches!(event, Event::Done { cqe, .. } if cqe.status().is_ok()));
            });
            used += taken.unwrap();
        }
        let receiving = allocations() - before;
        assert_eq!((used, done), (asks.len() + answer.len(), DEPTH as u32));
        least = least.min(submitting + receiving);
    }
    least
}

#[test]
fn nothing_is_allocated_in_steady_state() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert!(allocations() > before, "the counter counts");
    for digests in [false, true] {
        assert_eq!(allocations_per_warm_round(digests, 8192, false), 0, "in capsules");
        assert_eq!(allocations_per_warm_round(digests, 0, false), 0, "on request");
        assert_eq!(allocations_per_warm_round(digests, 0, true), 0, "reads");
    }
}

/// Allocations of the round of writes that needs the fewest.
fn allocations_per_round_of_a_stream(rig: &mut Rig) -> u64 {
    let mut groups: Vec<_> = (0..DEPTH as u64 / 2).map(|lba| [write(lba % 32, lba)]).collect();
    let stages = Stages::of_initiator();
    let mut least = u64::MAX;
    for _ in 0..50 {
        let before = allocations();
        for group in &mut groups {
            let traced = rig.session.traces_next();
            let seq = rig.session.admit(group, 0, false).unwrap();
            if traced {
                rig.session.trace(seq, rig.now, rig.now);
            }
        }
        rig.session.pump(rig.now);
        rig.session.instant(rig.now);
        let submitting = allocations() - before;

        // The target's input and its answers are made outside the count.
        let bytes = stream_rig::all(rig.session.outbox(0));
        rig.scripts[0].take(&bytes);
        for command in std::mem::take(&mut rig.scripts[0].commands) {
            rig.scripts[0].answer(&command, 0, 0);
        }
        let answers = std::mem::take(&mut rig.scripts[0].output);
        let before = allocations();
        let used = rig.session.receive(0, rig.now, &answers, &mut |_, _, _| ());
        let marks = rig.session.poll().unwrap();
        if rig.session.has_traced() {
            stages.record(&rig.session.traced(rig.now));
        }
        let receiving = allocations() - before;
        assert_eq!(
            (used, marks.durable),
            (Ok(answers.len()), rig.session.engine().last_admitted())
        );
        least = least.min(submitting + receiving);
    }
    assert!(stages.snapshot().all(|(_, seen)| seen.count() > 0), "some were traced");
    least
}

#[test]
fn an_ordered_stream_allocates_nothing_per_write() {
    let mut rig = Rig::new(Shape { depth: DEPTH, ..Shape::of(1, false) });
    assert_eq!(allocations_per_round_of_a_stream(&mut rig), 0);
    rig.submit(&[write(1, 1)]);
    let sent = rig.take(0);
    rig.cut(0);
    rig.back(0, 2, log(&[(sent.last().unwrap().clone(), false)]));
    for command in rig.take(0) {
        rig.answer(0, &command, 0);
    }
    rig.marks();
    assert_eq!(allocations_per_round_of_a_stream(&mut rig), 0, "after a loss");
}

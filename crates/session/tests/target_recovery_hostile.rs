//! T18, T19: lists, settlements and claims that make no sense, and logs that are not valid.

mod world;

use riopipe_order::attribute::{Attribute, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::log_region::{Class, HEADER_BYTES, LogRegion, inspect};
use riopipe_order::region::Region;
use riopipe_session::target::Volumes;
use riopipe_session::wire::list::{PAGE_BYTES_MAX, SETTLE_LEN, Settle, SettleStream};
use riopipe_session::wire::{self, Claim};
use riopipe_testkit::{Random, peer};
use world::{
    BOOT, LOG_LEN, VOLUME, World, attribute, block, crc, identity, ordered, riopipe_bytes,
};

const THIRD: &str = "nqn.2014-08.org.nvmexpress:uuid:third";
const THIRD_ID: [u8; 16] = *b"scripted-host-03";

#[test]
fn t18_lists_that_make_no_sense_are_refused() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    for len in [0, 1, 63, 65, 100, PAGE_BYTES_MAX + 64, 1 << 31, u32::MAX as usize] {
        assert_eq!(w.page(admin, 0, 0, len), Err(0x02), "{len} bytes");
        let own = wire::own_list_command(Position(0), len);
        let sqe = riopipe_bytes(&own).cid(1).transport(len as u32);
        assert_eq!(w.ask(io, sqe), Err(0x70f), "an unbound queue has no list");
    }
    assert_eq!(w.page(admin, 2, 0, 4096), Err(0x70e));
    assert_eq!(w.page(admin, u16::MAX, 0, 4096), Err(0x70e));
    let list = |volume, stream: u32, sgl: u32| {
        let sqe = wire::list_command(volume, StreamId(0), Position(0), 4096);
        riopipe_bytes(&sqe).dword(11, stream).cid(1).transport(sgl)
    };
    assert_eq!(w.ask(admin, list(VOLUME, 1 << 16, 4096)), Err(0x70e), "no stream is cut to 0");
    assert_eq!(w.ask(admin, list(VolumeId([8; 16]), 0, 4096)), Err(0x70c));
    assert_eq!(w.ask(admin, list(VOLUME, 0, 4032)), Err(0x0f), "the host's buffer is shorter");
    assert_eq!(w.ask(admin, list(VOLUME, 0, 4096).inline(4096)), Err(0x11));
    assert!(w.ask(admin, list(VOLUME, 0, 8192)).is_ok());
    // On the wrong queue.
    assert_eq!(w.ask(io, list(VOLUME, 0, 4096)), Err(0x01));
    let own = riopipe_bytes(&wire::own_list_command(Position(0), 4096)).cid(1).transport(4096);
    assert_eq!(w.ask(admin, own), Err(0x01));
    // On a bound queue.
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (1, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 2).status, 0);
    for len in [0, 63, PAGE_BYTES_MAX + 64] {
        let own = wire::own_list_command(Position(u64::MAX), len);
        assert_eq!(w.ask(io, riopipe_bytes(&own).cid(1).transport(len as u32)), Err(0x02));
    }
    assert_eq!(w.own_list(io).unwrap().entries, []);
}

#[test]
fn t18_settlements_that_make_no_sense_are_refused() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    assert_eq!(w.settle(admin, 2, &[(2, 0, false)]), 0x70e);
    assert!(w.host.log.last().unwrap().contains("settle refused"), "{:?}", w.host.log);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (700, 0, false)]), 0x70e);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false), (0, 3, false)]), 0x02, "one stream twice");
    assert_eq!(w.settle(admin, 2, &[(0, 1 << 63, false)]), 0x02, "beyond all groups");
    assert_eq!(w.settle(admin, 1, &[(0, 2, false)]), 0x702);
    assert_eq!(w.settle(admin, 3, &[(0, 2, false)]), 0x702);
    let with = |change: fn(&mut Vec<u8>)| {
        let streams = vec![SettleStream { stream: StreamId(0), keep: false, k: Seq(2), tag: 0 }];
        let mut data = Settle { volume: VOLUME, generation: 2, streams }.encode();
        change(&mut data);
        data
    };
    let sqe = riopipe_bytes(&wire::settle_command()).cid(9).inline(SETTLE_LEN as u32);
    assert_eq!(w.call(admin, sqe, &with(|d| d[0] ^= 1)).status, 0x70c, "another volume");
    assert_eq!(w.call(admin, sqe, &with(|d| d[20] = 161)).status, 0x02, "more than fit");
    assert_eq!(w.call(admin, sqe, &with(|d| d[21] = 0xff)).status, 0x02);
    assert_eq!(w.call(admin, sqe, &with(|d| d[34] = 2)).status, 0x02, "unknown flags");
    assert_eq!(w.call(admin, sqe, &[0xff; SETTLE_LEN]).status, 0x02);
    assert_eq!(w.call(admin, sqe.inline(64), &[0; 64]).status, 0x0f);
    assert_eq!(w.call(io, sqe, &with(|_| ())).status, 0x01, "not on an I/O queue");
    assert_eq!(w.list(admin, 0).unwrap().live, 4, "none has changed anything");
    assert!(!w.list(admin, 0).unwrap().settled);
    // Released groups are never undone.
    assert_eq!(w.settle(admin, 2, &[(0, 2, true), (1, 0, false)]), 0);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0);
    assert_eq!(w.bind(io, 0, 2, 2).status, 0);
    let third = Attribute { ordinal: 1, ..attribute(3, 3) };
    assert_eq!(w.call(io, ordered(1, &third, 2), &block(3)).status, 0);
    w.hang_up(io);
    assert_eq!(w.settle(admin, 2, &[(0, 1, false)]), 0x02);
    assert_eq!(w.settle(admin, 2, &[(0, 3, false)]), 0);
    // The data may come on request, too.
    let mut again = with(|_| ());
    again[40] = 3;
    w.command(admin, sqe.transport(SETTLE_LEN as u32), &[]);
    let r2t = w.next(admin).unwrap();
    assert_eq!((r2t.kind, r2t.u32(16)), (0x09, SETTLE_LEN as u32));
    let data = peer::h2c_data(peer::Digests::default(), 9, r2t.u16(10), 0, &again, true);
    w.send(admin, &data);
    assert_eq!(w.next(admin).unwrap().completion().status, 0);
}

#[test]
fn t19_what_is_lost_is_neither_listed_nor_settled() {
    let w = World::abandoned();
    let parts = w.host.parts.crash(1);
    let header = match inspect(&parts.part(0..HEADER_BYTES), LOG_LEN, BOOT, crc) {
        Class::Ours(header) => header,
        other => panic!("{other:?}"),
    };
    let (at, len) = w.partition(1);
    let lost = Volumes::with_lost_log(header, crc);
    let mut w = World::over(&[true], identity(), parts.clone(), lost);
    let (third, _) = w.admin_as(THIRD, THIRD_ID, 0);
    assert_eq!(w.list(third, 0), Err(0x710));
    let back = Claim { resume: true, ..w.next_claim(1) };
    let (admin, _) = w.admin();
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x710, "nor is it gone on with");

    // One partition is blank where it must not be.
    let mut part = parts.part(at..at + len);
    part.write(0, &vec![0; len]);
    part.fence().unwrap();
    let header = parts.part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let mine = parts.clone();
    let split = Box::new(move |range: std::ops::Range<usize>| Ok(mine.part(range)));
    let (volumes, problems) = Volumes::with_log(region, split, crc);
    assert_eq!(problems.len(), 1);
    let mut w = World::over(&[true], identity(), parts, volumes);
    let (admin, _) = w.admin();
    assert_eq!((w.list(admin, 0), w.list(admin, 1)), (Err(0x710), Err(0x710)));
    assert_eq!(w.claim(admin, &back).unwrap().status, 0x710);
}

/// A target crashes while a claim begins partitions anew whose content its owner has given up.
#[test]
fn t26_a_partition_that_was_given_up_may_be_blank_after_a_crash() {
    let w = World::abandoned();
    let (at, len) = w.partition(1);
    let header = w.host.parts.part(0..HEADER_BYTES);
    let region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
    let generation = region.volume(VOLUME).unwrap().generation;
    for later in [0, 1] {
        let parts = w.host.parts.crash(1);
        let mut part = parts.part(at..at + len);
        part.write(0, &vec![0; len]);
        part.fence().unwrap();
        let header = parts.part(0..HEADER_BYTES);
        let mut region = LogRegion::open(header, LOG_LEN, BOOT, crc).unwrap();
        region.give_up(VOLUME, generation + later).unwrap();
        let split = Box::new(move |range: std::ops::Range<usize>| Ok(parts.part(range)));
        let (_, problems) = Volumes::with_log(region, split, crc);
        // A claim that was granted has begun its partitions anew: then a blank one is a loss.
        assert_eq!(problems.len(), 1 - later as usize, "{problems:?}");
    }
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.index(from.len())]
}

#[test]
fn t18_random_vendor_commands_are_answered_once_each() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut answers = [0u32; 2];
    for _ in 0..300 {
        let mut w = World::abandoned();
        let (admin, cntlid) = w.admin();
        let queues = [admin, w.io(cntlid, 1), w.io(cntlid, 2)];
        for _ in 0..30 {
            let at = pick(&mut random, &queues);
            if w.links[at].closed.is_some() {
                continue;
            }
            let opcode =
                pick(&mut random, &[0xc1, 0xc2, 0xc4, 0xc6, 0xc6, 0xc9, 0xc9, 0x84, 0x88, 0x8a]);
            let mut sqe = peer::Sqe::new(opcode, 9, 1);
            let nearly = !random.one_in(4);
            for dword in [2, 3, 10, 11, 12, 13, 14, 15] {
                let value = match (dword, nearly) {
                    (12.., true) => u32::from_le_bytes([7; 4]),
                    (10, true) => pick(&mut random, &[0, 1, 64, 128, 4096, 1 << 31, 1 << 31 | 1]),
                    (11, true) => pick(&mut random, &[0, 1, 2, 3, 4]),
                    (_, true) => pick(&mut random, &[0, 1, 2, u32::MAX]),
                    _ => random.next() as u32,
                };
                sqe = sqe.dword(dword, value);
            }
            let data: Vec<u8> = match opcode {
                0xc1 => {
                    let mut claim = w.next_claim(pick(&mut random, &[1, 2, 3, 9]));
                    claim.take_over = random.one_in(2);
                    claim.resume = random.one_in(2);
                    claim.encode()
                }
                0xc9 => {
                    let one = |random: &mut Random| SettleStream {
                        stream: StreamId(pick(random, &[0, 1, 1, 2])),
                        keep: random.one_in(2),
                        k: Seq(pick(random, &[0, 1, 2, 3, 4, 5])),
                        tag: 5,
                    };
                    let streams = (0..random.below(4)).map(|_| one(&mut random)).collect();
                    let generation = pick(&mut random, &[1, 2, 3, 9]);
                    Settle { volume: VOLUME, generation, streams }.encode()
                }
                _ => Vec::new(),
            };
            let mut data = data;
            if !nearly && !data.is_empty() {
                let at = random.index(64);
                data[at] ^= 1 << random.below(8);
            }
            sqe = if data.is_empty() {
                sqe.transport(sqe_len(&sqe))
            } else {
                sqe.inline(data.len() as u32)
            };
            w.command(at, sqe, &data);
            let mut completions = Vec::new();
            while let Some(pdu) = w.next(at) {
                if pdu.kind != 0x07 {
                    completions.push(pdu.completion());
                }
            }
            assert_eq!(completions.len(), 1, "{:x?}", &sqe.0);
            assert_eq!(completions[0].cid, 9);
            answers[usize::from(completions[0].status == 0)] += 1;
        }
        for at in queues {
            w.hang_up(at);
            assert!(w.links[at].conn.is_drained());
        }
    }
    assert!(answers.iter().all(|n| *n > 500), "refused and taken: {answers:?}");
}

/// The length in dword 10 of a command.
fn sqe_len(sqe: &peer::Sqe) -> u32 {
    u32::from_le_bytes([sqe.0[40], sqe.0[41], sqe.0[42], sqe.0[43]])
}

#[test]
fn t9_a_log_that_failed_while_settling_decides_nothing_until_the_target_starts_again() {
    let mut w = World::abandoned();
    let (admin, io) = w.successor(2);
    let before = w.list(admin, 0).unwrap();
    let (at, _) = w.partition(0);
    w.host.parts.fail_fences_after(at, 0);
    assert_eq!(w.settle(admin, 2, &[(0, 2, false)]), 0x711);
    // In memory it is settled, but the next reader of the log may find it as it was.
    assert_eq!(w.list(admin, 0), Err(0x711));
    assert_eq!(w.bind(io, 0, 2, 2).status, 0x711, "not recovered, and that is why");
    assert!(w.list(admin, 1).is_ok(), "the other stream's is fine");
    let mut w = w.restart(3);
    let (admin, io) = w.successor(3);
    assert_eq!(w.list(admin, 0), Ok(before));
    assert_eq!(w.settle(admin, 3, &[(0, 2, false), (1, 0, false)]), 0);
    assert_eq!(w.bind(io, 0, 3, 2).status, 0);
}

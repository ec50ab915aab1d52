//! Namespaces with logical blocks of 512 bytes over drives with blocks of 4096 bytes, against models
//! that know nothing of the drive's blocks.

mod world;

use std::collections::BTreeMap;

use riopipe_testkit::peer::{self, Received, Sqe};
use riopipe_testkit::{Random, peer::Completion};
use world::{BLOCKS, What, World};

/// Bytes of a logical block.
const LBA: usize = 512;
/// Logical blocks of the namespace.
const LBAS: u64 = 8 * BLOCKS;
const LBA_OUT_OF_RANGE: u16 = 0x80;
const INVALID_FIELD: u16 = 0x02;
const COMPARE_FAILED: u16 = 0x285;
const FUSED_FAILED: u16 = 0x09;
const ATOMIC_UNIT: u16 = 0x14;
const SIZE_LIMIT: u16 = 0x183;

fn blocks(sqe: Sqe, lba: u64, count: u32) -> Sqe {
    sqe.dword(10, lba as u32).dword(11, (lba >> 32) as u32).dword(12, count - 1)
}

fn write(cid: u16, lba: u64, count: u32) -> Sqe {
    blocks(Sqe::new(0x01, cid, 1), lba, count).inline(count * 512)
}

fn write_r2t(cid: u16, lba: u64, count: u32) -> Sqe {
    write(cid, lba, count).transport(count * 512)
}

fn read(cid: u16, lba: u64, count: u32) -> Sqe {
    blocks(Sqe::new(0x02, cid, 1), lba, count).transport(count * 512)
}

fn compare(cid: u16, lba: u64, count: u32) -> Sqe {
    blocks(Sqe::new(0x05, cid, 1), lba, count).inline(count * 512)
}

fn deallocate(cid: u16, ranges: &[(u64, u32)]) -> (Sqe, Vec<u8>) {
    let mut list = Vec::new();
    for (lba, count) in ranges {
        list.extend([0; 4]);
        list.extend(count.to_le_bytes());
        list.extend(lba.to_le_bytes());
    }
    let sqe = Sqe::new(0x09, cid, 1).inline(list.len() as u32);
    (sqe.dword(10, ranges.len() as u32 - 1).dword(11, 4), list)
}

/// Logical blocks with this content, each with a number of its own.
fn content(seed: u32, count: u32) -> Vec<u8> {
    (0..count).flat_map(|i| tagged(seed.wrapping_mul(1009).wrapping_add(i))).collect()
}

/// A logical block that consists of this tag.
fn tagged(tag: u32) -> Vec<u8> {
    tag.to_le_bytes().repeat(LBA / 4)
}

/// A host with two I/O queues, each with a connection of its own.
fn two_queues() -> (World, usize, usize) {
    let mut w = World::with_small_blocks(1);
    let (_, cntlid) = w.admin();
    let [one, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    (w, one, other)
}

fn bytes_of_drive(w: &World, lba: u64, count: u32) -> Vec<u8> {
    let (first, end) = (lba / 8, (lba + u64::from(count)).div_ceil(8));
    let all: Vec<u8> = (first..end).flat_map(|block| w.host.drives[0].block(block)).collect();
    let start = (lba % 8) as usize * LBA;
    all[start..start + count as usize * LBA].to_vec()
}

/// Carries out a read, and gathers its data from all of its PDUs.
fn read_all(w: &mut World, io: usize, lba: u64, count: u32) -> (Vec<u8>, u16) {
    w.command(io, read(900, lba, count), &[]);
    let mut data = Vec::new();
    loop {
        let pdu = w.next(io).expect("an answer");
        if pdu.kind == 0x05 {
            return (data, pdu.completion().status);
        }
        assert_eq!((pdu.kind, pdu.u32(12)), (0x07, data.len() as u32), "data in order");
        data.extend_from_slice(&pdu.data);
    }
}

/// Carries out a command whose data is requested.
fn call_r2t(w: &mut World, io: usize, sqe: Sqe, data: &[u8]) -> u16 {
    w.command(io, sqe, &[]);
    loop {
        let pdu = w.next(io).expect("an answer");
        if pdu.kind == 0x05 {
            return pdu.completion().status;
        }
        w.send_data(io, &pdu, data);
    }
}

#[test]
fn identify_shows_the_size_and_what_is_atomic() {
    let mut w = World::with_small_blocks(1);
    let (admin, _) = w.admin();
    let (page, done) = w.fetch(admin, peer::identify(1, 0x00, 1));
    assert_eq!(done.status, 0);
    let u16_at = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
    for at in [0, 8, 16] {
        assert_eq!(u64::from_le_bytes(page[at..at + 8].try_into().unwrap()), LBAS);
    }
    // LBADS of the only format.
    assert_eq!((page[25], page[26], page[130]), (0, 0, 9));
    // NSFEAT: atomics and preferred granularities. 8 logical blocks are a block of the drive.
    assert_eq!(page[24], 1 << 1 | 1 << 4);
    for (at, what) in [(34, "NAWUN"), (36, "NAWUPF"), (40, "NABSN"), (44, "NABSPF")] {
        assert_eq!(u16_at(at), 7, "{what}");
    }
    for (at, what) in [(64, "NPWG"), (66, "NPWA"), (68, "NPDG"), (70, "NPDA")] {
        assert_eq!(u16_at(at), 7, "{what}");
    }
    assert_eq!((u16_at(38), u16_at(42)), (0, 0), "NACWU, NABO");
    assert_eq!((u16_at(74), page[80]), (16_384, 127), "MSSRL, MSRC");
    assert_eq!(u32::from_le_bytes(page[76..80].try_into().unwrap()), 16_384, "MCL");
}

#[test]
fn a_volume_cannot_have_it_as_a_member() {
    let parts = world::Parts::default();
    let mut w = World::with_small_blocks(1);
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim).map(|done| done.status), Some(0x0b), "Invalid Namespace");
    drop(parts);
    let io = w.io(1, 1);
    assert_eq!(w.call(io, write(1, 3, 1), &tagged(1)).status, 0, "plain hosts go on");
}

#[test]
fn edges_are_right_and_other_blocks_stay() {
    let (mut w, io, _) = two_queues();
    let before = content(1, 64);
    assert_eq!(w.call(io, write(1, 0, 64), &before).status, 0);
    for (lba, count) in [(3, 1), (7, 2), (8, 8), (5, 20), (15, 1), (16, 9), (1, 63)] {
        let data = content(lba as u32 + 77, count);
        assert_eq!(w.call(io, write(2, lba, count), &data).status, 0);
        let mut expected = before.clone();
        let start = lba as usize * LBA;
        expected[start..start + data.len()].copy_from_slice(&data);
        assert_eq!(bytes_of_drive(&w, 0, 64), expected, "{lba} {count}");
        assert_eq!(read_all(&mut w, io, lba, count), (data, 0));
        assert_eq!(w.call(io, write(3, 0, 64), &before).status, 0);
    }
    assert!(w.links[io].conn.is_quiet());
}

/// The size is counted in blocks of 512 bytes, and ends where the drive ends.
#[test]
fn the_limits_are_those_of_the_host() {
    let (mut w, io, _) = two_queues();
    let last = tagged(9);
    assert_eq!(w.call(io, write(1, LBAS - 1, 1), &last).status, 0);
    assert_eq!(read_all(&mut w, io, LBAS - 1, 1), (last, 0));
    for (lba, count) in [(LBAS, 1), (LBAS - 1, 2), (LBAS - 8, 9), (u64::MAX, 1), (u64::MAX - 6, 7)]
    {
        let data = vec![0; count as usize * LBA];
        assert_eq!(w.call(io, write(2, lba, count), &data).status, LBA_OUT_OF_RANGE, "{lba}");
        assert_eq!(w.call(io, read(3, lba, count), &[]).status, LBA_OUT_OF_RANGE);
        assert_eq!(w.call(io, compare(4, lba, count), &data).status, LBA_OUT_OF_RANGE);
        for code in [0x08, 0x0c] {
            let sqe = blocks(Sqe::new(code, 5, 1), lba, count);
            assert_eq!(w.call(io, sqe, &[]).status, LBA_OUT_OF_RANGE, "{code:#x}");
        }
        let (sqe, list) = deallocate(6, &[(lba, count)]);
        assert_eq!(w.call(io, sqe, &list).status, LBA_OUT_OF_RANGE);
        let (sqe, list) = peer::copy(7, 1, 0, &[(lba, count)]);
        assert_eq!(w.call(io, sqe, &list).status, LBA_OUT_OF_RANGE);
    }
    // 8 MiB are 16384 blocks (MDTS), whether aligned or not; one more is too many.
    let most = vec![3; 8 << 20];
    for lba in [16, 17] {
        assert_eq!(call_r2t(&mut w, io, write_r2t(8, lba, 16_384), &most), 0);
        assert_eq!(read_all(&mut w, io, lba, 16_384), (most.clone(), 0));
        assert_eq!(w.call(io, read(9, lba, 16_385), &[]).status, INVALID_FIELD);
        assert_eq!(w.call(io, write_r2t(9, lba, 16_385), &[]).status, INVALID_FIELD);
        assert_eq!(w.call(io, blocks(Sqe::new(0x0c, 9, 1), lba, 16_384), &[]).status, 0);
        let verify = blocks(Sqe::new(0x0c, 9, 1), lba, 16_385);
        assert_eq!(w.call(io, verify, &[]).status, INVALID_FIELD);
        // MSSRL and MCL.
        let (sqe, list) = peer::copy(9, 1, 40_000 + lba, &[(lba, 16_384)]);
        assert_eq!(w.call(io, sqe, &list).status, 0);
        let (sqe, list) = peer::copy(9, 1, 40_000 + lba, &[(lba, 16_384), (0, 1)]);
        assert_eq!(w.call(io, sqe, &list).status, SIZE_LIMIT);
    }
    // As many blocks as a Write Zeroes can name.
    assert_eq!(w.call(io, blocks(Sqe::new(0x08, 9, 1), 3, 65_536), &[]).status, 0);
    assert_eq!(bytes_of_drive(&w, 3, 16_384), vec![0; 8 << 20]);
    // Data of another length.
    assert_eq!(w.call(io, write(10, 1, 1).inline(4096), &vec![0; 4096]).status, 0x0f);
    assert_eq!(w.call(io, write(10, 0, 8).inline(8 * 4096), &vec![0; 32_768]).status, 0x0f);
    assert!(w.links[io].conn.is_quiet());
}

/// The log of errors counts blocks as the host does.
#[test]
fn errors_name_the_block_of_the_host() {
    let (mut w, io, _) = two_queues();
    w.host.drives[0].failing = true;
    assert_eq!(w.call(io, write(1, 8003, 1), &tagged(1)).status, 0x280);
    assert_eq!(w.call(io, write(2, 8008, 8), &content(1, 8)).status, 0x280);
    assert_eq!(w.call(io, read(3, 8001, 9), &[]).status, 0x281);
    assert_eq!(w.call(io, read(4, LBAS + 5, 1), &[]).status, LBA_OUT_OF_RANGE);
    w.host.drives[0].failing = false;
    let (page, _) = w.fetch(0, peer::get_log(5, 0x01, 0, 256));
    let lba = |at: usize| u64::from_le_bytes(page[at + 16..at + 24].try_into().unwrap());
    assert_eq!([0, 64, 128, 192].map(lba), [LBAS + 5, 8001, 8008, 8003]);
}

#[test]
fn compare_and_write_is_of_one_block_of_512_bytes() {
    let (mut w, io, _) = two_queues();
    let before = content(1, 8);
    assert_eq!(w.call(io, write(1, 0, 8), &before).status, 0);
    let pair = |w: &mut World, lba: u64, old: &[u8], new: &[u8]| -> Vec<u16> {
        let count = (old.len() / LBA) as u32;
        w.command(io, compare(10, lba, count).first_half(), old);
        w.command(io, write(11, lba, count).second_half(), new);
        w.completions(io).iter().map(|done| done.status).collect()
    };
    let (old, new) = (before[3 * LBA..4 * LBA].to_vec(), tagged(7));
    assert_eq!(pair(&mut w, 3, &old, &new), [0, 0]);
    let mut expected = before.clone();
    expected[3 * LBA..4 * LBA].copy_from_slice(&new);
    assert_eq!(bytes_of_drive(&w, 0, 8), expected);
    assert_eq!(pair(&mut w, 3, &old, &new), [COMPARE_FAILED, FUSED_FAILED]);
    // NACWU is 0: two blocks are too many, also if they are in one block of the drive.
    assert_eq!(pair(&mut w, 3, &[0; 1024], &[0; 1024]), [ATOMIC_UNIT, FUSED_FAILED]);
    assert_eq!(pair(&mut w, 0, &[0; 4096], &[0; 4096]), [ATOMIC_UNIT, FUSED_FAILED]);
    assert_eq!(pair(&mut w, LBAS, &old, &new), [LBA_OUT_OF_RANGE, FUSED_FAILED]);
    // Two blocks of the host that are in one block of the drive are not the same block.
    w.command(io, compare(10, 3, 1).first_half(), &new);
    w.command(io, write(11, 4, 1).second_half(), &old);
    let statuses: Vec<u16> = w.completions(io).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [FUSED_FAILED, INVALID_FIELD]);
    assert_eq!(bytes_of_drive(&w, 0, 8), expected);
    assert!(w.links[io].conn.is_quiet());
}

/// All commands in random order, one at a time, against an array of bytes.
#[test]
fn every_command_does_to_the_drive_what_it_does_to_an_array() {
    const AREA: u64 = 6000;
    for seed in 0..20 {
        let mut random = Random(seed);
        let (mut w, one, other) = two_queues();
        let mut model = vec![0u8; AREA as usize * LBA];
        let bytes = |lba: u64, count: u32| {
            let start = lba as usize * LBA;
            start..start + count as usize * LBA
        };
        for step in 0..200u32 {
            let io = if random.one_in(2) { one } else { other };
            // Most are small, some have several pieces.
            let most = if random.one_in(10) { 2500 } else { 30 };
            let count = 1 + random.below(most) as u32;
            let lba = random.below(AREA - u64::from(count));
            let data = content(step + 1, count);
            let range = bytes(lba, count);
            let inline = count <= 64 && random.one_in(2);
            match random.below(9) {
                0..=2 if inline => {
                    assert_eq!(w.call(io, write(1, lba, count), &data).status, 0);
                    model[range].copy_from_slice(&data);
                }
                0..=2 => {
                    assert_eq!(call_r2t(&mut w, io, write_r2t(1, lba, count), &data), 0);
                    model[range].copy_from_slice(&data);
                }
                3 => {
                    let deac = u8::from(random.one_in(2)) << 1;
                    let sqe = blocks(Sqe::new(0x08, 1, 1), lba, count).byte(51, deac);
                    assert_eq!(w.call(io, sqe, &[]).status, 0);
                    model[range].fill(0);
                }
                4 => {
                    let (sqe, list) = deallocate(1, &[(lba, count)]);
                    assert_eq!(w.call(io, sqe, &list).status, 0);
                    // What is left of blocks of the drive stays as it is.
                    let (start, end) = (lba.div_ceil(8) * 8, (lba + u64::from(count)) / 8 * 8);
                    if start < end {
                        model[bytes(start, (end - start) as u32)].fill(0);
                    }
                }
                5 => {
                    // Two ranges to a place that neither of them has.
                    let half = AREA / 2;
                    let count = count.min(1000);
                    let (from, second) = (random.below(half - 1000), random.below(half - 1000));
                    let to = half + random.below(half - 2000);
                    let (sqe, list) = peer::copy(1, 1, to, &[(from, count), (second, 3)]);
                    assert_eq!(w.call(io, sqe, &list).status, 0);
                    model.copy_within(bytes(from, count), to as usize * LBA);
                    let to = to + u64::from(count);
                    model.copy_within(bytes(second, 3), to as usize * LBA);
                }
                6 => {
                    let mut expected = model[range].to_vec();
                    let flip = random.one_in(2);
                    if flip {
                        let at = random.below(expected.len() as u64) as usize;
                        expected[at] ^= 1;
                    }
                    let status = if flip { COMPARE_FAILED } else { 0 };
                    let sqe = compare(1, lba, count).transport(count * 512);
                    assert_eq!(call_r2t(&mut w, io, sqe, &expected), status);
                }
                7 => {
                    assert_eq!(w.call(io, blocks(Sqe::new(0x0c, 1, 1), lba, count), &[]).status, 0);
                }
                _ => assert_eq!(read_all(&mut w, io, lba, count), (model[range].to_vec(), 0)),
            }
            assert!(w.links[io].conn.is_quiet(), "seed {seed} step {step}");
        }
        assert_eq!(bytes_of_drive(&w, 0, AREA as u32), model, "seed {seed}");
    }
}

/// A write that has not ended.
struct Running {
    link: usize,
    lba: u64,
    count: u32,
    data: Vec<u8>,
}

/// By logical block: the tags that it may have once all writes have ended.
#[derive(Default)]
struct Outcomes(BTreeMap<u64, Vec<(u32, Option<u16>)>>);

impl Outcomes {
    /// A write with the number `cid` begins. Those that have ended before cannot come after it.
    fn begin(&mut self, lba: u64, tag: u32, cid: u16) {
        let of_block = self.0.entry(lba).or_insert_with(|| vec![(0, None)]);
        of_block.retain(|(_, running)| running.is_some());
        of_block.push((tag, Some(cid)));
    }

    fn end(&mut self, cid: u16) {
        for of_block in self.0.values_mut() {
            for (_, running) in of_block {
                if *running == Some(cid) {
                    *running = None;
                }
            }
        }
    }
}

/// Writes of three hosts to a few blocks of the drive, in all interleavings that a seed chooses. Writes
/// of different logical blocks in one block of the drive are all there in the end, and each logical block
/// has one of those that ended last.
#[test]
fn no_write_is_lost_that_shares_a_block_of_the_drive() {
    const AREA: u64 = 40;
    // Source of copies: never written.
    const SOURCE: u64 = 800;
    for seed in 0..150 {
        let mut random = Random(seed);
        let mut w = World::with_small_blocks(1);
        let links = [1, 2, 3].map(|number| {
            let name = format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}");
            let (_, cntlid) = w.admin_as(&name, [number; 16], 0);
            w.io_as(&name, [number; 16], cntlid, 1)
        });
        let source = content(4_000_000, 32);
        assert_eq!(w.call(links[0], write(999, SOURCE, 32), &source).status, 0);
        let source_tag =
            |at: usize| u32::from_le_bytes(source[at * LBA..][..4].try_into().unwrap());
        w.host.drives[0].holds = true;
        let mut outcomes = Outcomes::default();
        let mut running: BTreeMap<u16, Running> = BTreeMap::new();
        let mut next = 1u16;
        for _ in 0..120 {
            if running.len() < 12 && random.one_in(2) {
                let link = links[random.below(3) as usize];
                let count = 1 + random.below(11) as u32;
                let lba = random.below(AREA - u64::from(count));
                let cid = next;
                next += 1;
                let mut data = content(u32::from(cid), count);
                let mut inline = vec![];
                let sqe = match random.below(6) {
                    0..=1 => {
                        inline.clone_from(&data);
                        write(cid, lba, count)
                    }
                    2..=3 => write_r2t(cid, lba, count),
                    4 => {
                        data = vec![0; count as usize * LBA];
                        blocks(Sqe::new(0x08, cid, 1), lba, count)
                    }
                    _ => {
                        let from = random.below(20);
                        data = (0..count)
                            .flat_map(|i| tagged(source_tag(from as usize + i as usize)))
                            .collect();
                        let (sqe, list) = peer::copy(cid, 1, lba, &[(SOURCE + from, count)]);
                        inline = list;
                        sqe
                    }
                };
                for (lba, block) in (lba..).zip(data.chunks(LBA)) {
                    let tag = u32::from_le_bytes(block[..4].try_into().unwrap());
                    outcomes.begin(lba, tag, cid);
                }
                w.command(link, sqe, &inline);
                running.insert(cid, Running { link, lba, count, data });
            } else if !w.host.drives[0].pending.is_empty() {
                let at = random.below(w.host.drives[0].pending.len() as u64) as usize;
                w.complete(0, at);
            }
            answer(&mut w, &links, &mut running, &mut outcomes);
        }
        while !running.is_empty() {
            let pending = w.host.drives[0].pending.len() as u64;
            assert!(pending > 0, "seed {seed}: {} writes hang", running.len());
            w.complete(0, random.below(pending) as usize);
            answer(&mut w, &links, &mut running, &mut outcomes);
        }
        assert!(links.iter().all(|link| w.links[*link].conn.is_quiet()));
        for lba in 0..AREA {
            let block = bytes_of_drive(&w, lba, 1);
            let tag = u32::from_le_bytes(block[..4].try_into().unwrap());
            assert_eq!(block, tagged(tag), "seed {seed}: block {lba} is of one write");
            let allowed = outcomes.0.get(&lba).cloned().unwrap_or_else(|| vec![(0, None)]);
            assert!(allowed.iter().any(|(other, _)| *other == tag), "seed {seed}: block {lba}");
        }
        assert_eq!(bytes_of_drive(&w, SOURCE, 32), source);
    }
}

/// Sends the data that was asked for, and notes which writes have ended.
fn answer(
    w: &mut World,
    links: &[usize],
    running: &mut BTreeMap<u16, Running>,
    outcomes: &mut Outcomes,
) {
    for &link in links {
        while let Some(pdu) = w.next(link) {
            if pdu.kind == 0x09 {
                let write = &running[&pdu.u16(8)];
                let data = write.data.clone();
                w.send_data(link, &pdu, &data);
                continue;
            }
            let done = pdu.completion();
            assert_eq!(done.status, 0, "{done:?}");
            let write = running.remove(&done.cid).expect("a write that has not ended");
            assert_eq!((write.link, write.data.len()), (link, write.count as usize * LBA));
            assert!(write.lba < 40);
            outcomes.end(done.cid);
        }
    }
}

fn pending(w: &World) -> Vec<(u64, &'static str)> {
    let what = |what: &What| match what {
        What::Read(_) => "read",
        What::Write(_) => "write",
        What::Flush => "flush",
        _ => "other",
    };
    w.host.drives[0].pending.iter().map(|one| (one.lba, what(&one.what))).collect()
}

fn statuses(w: &mut World, io: usize) -> Vec<(u16, u16)> {
    w.completions(io).iter().map(|done: &Completion| (done.cid, done.status)).collect()
}

/// A connection changes one block at a time in part, so there are not more locks than connections.
#[test]
fn t28_a_connection_has_one_lock_at_a_time_and_all_have_their_turn() {
    let (mut w, io, other) = two_queues();
    w.host.drives[0].holds = true;
    for cid in 0..20 {
        w.command(io, write(cid, 8 * u64::from(cid) + 3, 1), &tagged(cid.into()));
    }
    assert_eq!(pending(&w), [(0, "read")]);
    // One that has whole blocks does not wait for them.
    w.command(other, write(30, 800, 8), &content(1, 8));
    assert_eq!(pending(&w), [(0, "read"), (100, "write")]);
    w.complete(0, 1);
    let mut order = Vec::new();
    while let [(lba, _)] = pending(&w)[..] {
        order.push(lba);
        w.complete(0, 0);
    }
    let expected: Vec<u64> = (0..20).flat_map(|lba| [lba, lba]).collect();
    assert_eq!(order, expected);
    assert_eq!(statuses(&mut w, io), (0..20).map(|cid| (cid, 0)).collect::<Vec<_>>());
}

/// Write Zeroes of these blocks.
fn zeroes(cid: u16, lba: u64, count: u32) -> Sqe {
    blocks(Sqe::new(0x08, cid, 1), lba, count)
}

/// The second part of a command waits behind commands that have waited longer.
#[test]
fn a_command_of_two_parts_does_not_keep_its_turn() {
    let (mut w, io, _) = two_queues();
    w.host.drives[0].holds = true;
    w.command(io, zeroes(1, 7, 2), &[]);
    w.command(io, write(2, 83, 1), &tagged(2));
    w.command(io, write(3, 91, 1), &tagged(3));
    let mut order = Vec::new();
    while let [one] = pending(&w)[..] {
        order.push(one);
        w.complete(0, 0);
    }
    let (read, write) = ("read", "write");
    let expected = [0, 10, 11, 1].into_iter().flat_map(|lba| [(lba, read), (lba, write)]);
    assert_eq!(order, expected.collect::<Vec<_>>());
    assert_eq!(statuses(&mut w, io), [(2, 0), (3, 0), (1, 0)]);
}

/// A block is not read while an operation of the same connection changes it.
#[test]
fn a_write_in_part_waits_for_what_its_own_connection_has_begun() {
    let (mut w, io, _) = two_queues();
    w.host.drives[0].holds = true;
    let whole = content(1, 8);
    w.command(io, write(1, 0, 8), &whole);
    w.command(io, write(2, 3, 1), &tagged(9));
    assert_eq!(pending(&w), [(0, "write")]);
    w.complete_all(0);
    let mut expected = whole;
    expected[3 * LBA..4 * LBA].copy_from_slice(&tagged(9));
    assert_eq!(bytes_of_drive(&w, 0, 8), expected);
    assert_eq!(statuses(&mut w, io), [(1, 0), (2, 0)]);
}

/// The whole blocks between two parts are locked by another connection.
#[test]
fn zeroes_wait_for_the_whole_blocks_between_their_parts() {
    let (mut w, io, other) = two_queues();
    assert_eq!(w.call(io, write(1, 0, 24), &content(1, 24)).status, 0);
    w.host.drives[0].holds = true;
    w.command(other, write(2, 9, 1), &tagged(9));
    w.command(io, zeroes(3, 7, 10), &[]);
    assert_eq!(pending(&w), [(1, "read"), (0, "read")]);
    // The first part is zeroed. The other write is still between its read and its write.
    w.complete(0, 1);
    w.complete(0, 1);
    assert_eq!(pending(&w), [(1, "read")]);
    w.complete_all(0);
    assert_eq!((statuses(&mut w, other), statuses(&mut w, io)), (vec![(2, 0)], vec![(3, 0)]));
    assert_eq!(bytes_of_drive(&w, 7, 10), vec![0; 10 * LBA]);
    assert_eq!(bytes_of_drive(&w, 6, 1), content(1, 24)[6 * LBA..7 * LBA]);
    assert_eq!(bytes_of_drive(&w, 17, 1), content(1, 24)[17 * LBA..18 * LBA]);
}

/// Waiting commands end when the connection ends, and others get the block.
#[test]
fn a_connection_that_ends_leaves_no_lock() {
    for completed in 0..3 {
        let (mut w, io, other) = two_queues();
        w.host.drives[0].holds = true;
        for cid in 0..3 {
            w.command(io, write(cid, u64::from(cid), 1), &tagged(1));
        }
        w.command(other, write(9, 5, 1), &tagged(9));
        for _ in 0..completed {
            w.complete(0, 0);
        }
        w.hang_up(io);
        w.complete_all(0);
        assert_eq!(statuses(&mut w, other), [(9, 0)]);
        assert_eq!(bytes_of_drive(&w, 5, 1), tagged(9));
        assert!(w.links[io].conn.is_drained());
    }
}

#[test]
fn a_drive_that_fails_fails_the_write_and_frees_the_block() {
    let (mut w, io, _) = two_queues();
    w.host.drives[0].holds = true;
    for step in 0..2 {
        w.command(io, write(1, 3, 1), &tagged(1));
        for _ in 0..step {
            w.complete(0, 0);
        }
        w.fail(0, 0);
        assert_eq!(statuses(&mut w, io), [(1, 0x280)], "{step}");
        w.command(io, write(2, 3, 1), &tagged(2));
        w.complete_all(0);
        assert_eq!(statuses(&mut w, io), [(2, 0)]);
    }
    assert_eq!(bytes_of_drive(&w, 3, 1), tagged(2));
}

/// Without memory a command fails, and nothing is written.
#[test]
fn without_memory_it_fails_and_does_not_hang() {
    let (mut w, io, _) = two_queues();
    w.host.no_memory = true;
    assert_eq!(w.call(io, write(1, 3, 1), &tagged(1)).status, 0x06);
    let (sqe, list) = peer::copy(2, 1, 100, &[(3, 1)]);
    assert_eq!(w.call(io, sqe, &list).status, 0x06);
    w.host.no_memory = false;
    assert_eq!(w.call(io, write(3, 3, 1), &tagged(3)).status, 0);
    assert!(w.links[io].conn.is_quiet());
}

/// A host loses its access while its write reads the block: nothing is written.
#[test]
fn a_reservation_stops_a_write_between_read_and_write() {
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    w.command(other, write(2, 3, 1), &tagged(2));
    assert_eq!(pending(&w), [(0, "read")]);
    let (sqe, keys) = peer::acquire(3, 1, (0, 1), 7, 0);
    w.command(one, sqe, &keys);
    assert!(w.next(one).is_none(), "the operation in flight may still change the block");
    w.complete(0, 0);
    assert_eq!(statuses(&mut w, other), [(2, 0x83)], "Reservation Conflict");
    assert_eq!(statuses(&mut w, one), [(3, 0)]);
    assert!(pending(&w).is_empty());
    assert_eq!(bytes_of_drive(&w, 3, 1), vec![0; LBA]);
}

/// Two hosts with a queue each. The first one is registered with key 7.
fn two_hosts() -> (World, usize, usize) {
    let mut w = World::with_small_blocks(1);
    let [one, other] = [1, 2].map(|number| {
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:host-{number}");
        let (_, cntlid) = w.admin_as(&name, [number; 16], 0);
        w.io_as(&name, [number; 16], cntlid, 1)
    });
    let (sqe, keys) = peer::register(1, 1, 0, 0, 7);
    assert_eq!(w.call(one, sqe, &keys).status, 0);
    (w, one, other)
}

/// A host loses its access while its write waits for the block: the block is not even read.
#[test]
fn a_reservation_stops_a_write_that_waits_for_its_block() {
    let (mut w, one, other) = two_hosts();
    w.host.drives[0].holds = true;
    w.command(one, write(2, 3, 1), &tagged(2));
    w.command(other, write(3, 4, 1), &tagged(3));
    assert_eq!(pending(&w), [(0, "read")]);
    let (sqe, keys) = peer::acquire(4, 1, (0, 1), 7, 0);
    w.command(one, sqe, &keys);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, other), [(3, 0x83)]);
    let mut ends = statuses(&mut w, one);
    ends.sort_unstable();
    assert_eq!(ends, [(2, 0), (4, 0)]);
    assert_eq!(w.host.drives[0].history.len(), 2, "the read and the write of the first host");
}

/// A host loses its access between two parts of its zeroes: the rest stays.
#[test]
fn a_reservation_stops_zeroes_between_their_parts() {
    let (mut w, one, other) = two_hosts();
    let before = content(1, 24);
    assert_eq!(w.call(other, write(1, 0, 24), &before).status, 0);
    w.host.drives[0].holds = true;
    w.command(other, zeroes(2, 7, 10), &[]);
    w.complete(0, 0);
    assert_eq!(pending(&w), [(0, "write")]);
    let (sqe, keys) = peer::acquire(3, 1, (0, 1), 7, 0);
    w.command(one, sqe, &keys);
    w.complete(0, 0);
    assert!(pending(&w).is_empty(), "nothing more has begun");
    assert_eq!(statuses(&mut w, other), [(2, 0x83)]);
    assert_eq!(statuses(&mut w, one), [(3, 0)]);
    assert_eq!(bytes_of_drive(&w, 7, 1), vec![0; LBA]);
    assert_eq!(bytes_of_drive(&w, 8, 16), before[8 * LBA..]);
}

#[test]
fn abort_takes_back_what_waits() {
    let mut w = World::with_small_blocks(1);
    let (admin, cntlid) = w.admin();
    let [io, other] = [1, 2].map(|qid| w.io(cntlid, qid));
    w.host.drives[0].holds = true;
    w.command(other, write(1, 3, 1), &tagged(1));
    // Waits for the lock of the other connection.
    w.command(io, write(2, 4, 1), &tagged(2));
    let abort = |cid: u16| Sqe::new(0x08, 50, 0).dword(10, 1 | u32::from(cid) << 16);
    assert_eq!(w.call(admin, abort(2), &[]).result & 1, 0, "aborted");
    assert_eq!(statuses(&mut w, io), [(2, 0x07)]);
    w.complete_all(0);
    assert_eq!(statuses(&mut w, other), [(1, 0)]);
    assert_eq!(bytes_of_drive(&w, 4, 1), vec![0; LBA]);
    w.command(io, write(4, 4, 1), &tagged(4));
    w.complete_all(0);
    assert_eq!(statuses(&mut w, io), [(4, 0)]);
}

/// With FUA and a volatile cache the FLUSH follows the write.
#[test]
fn force_unit_access_flushes_after_the_write() {
    let mut w = World::over_drives(
        &[true],
        riopipe_order::write_order::DriveOrder::None,
        riopipe_session::target::LbaSize::Bytes512,
        world::identity(),
        world::Parts::default(),
        riopipe_session::target::Volumes::without_log(world::crc),
    );
    let (_, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].holds = true;
    for sqe in [write(1, 3, 1).byte(51, 0x40), blocks(Sqe::new(0x08, 1, 1), 3, 1).byte(51, 0x40)] {
        let data = if sqe.0[0] == 0x01 { tagged(1) } else { vec![] };
        w.command(io, sqe, &data);
        for expected in ["read", "write", "flush"] {
            assert_eq!(pending(&w), [(0, expected)]);
            assert!(w.next(io).is_none());
            w.complete(0, 0);
        }
        assert_eq!(statuses(&mut w, io), [(1, 0)]);
    }
}

/// Reads take what belongs to them, also with digests, in several PDUs.
#[test]
fn a_large_read_that_is_not_aligned_is_whole() {
    let (mut w, _, _) = two_queues();
    let digests = peer::Digests { header: true, data: true };
    let io = w.initialize(digests, 0);
    let data = peer::connect_data(world::SUBNQN, peer::HOSTNQN, peer::HOSTID, 1);
    assert_eq!(w.call(io, peer::connect(0, 3, 127, 0), &data).status, 0);
    let data = content(5, 5000);
    assert_eq!(call_r2t(&mut w, io, write_r2t(1, 5, 5000), &data), 0);
    assert_eq!(read_all(&mut w, io, 5, 5000), (data.clone(), 0));
    assert_eq!(read_all(&mut w, io, 7, 4000).0, data[2 * LBA..4002 * LBA]);
    let _: Option<Received> = w.next(io);
}

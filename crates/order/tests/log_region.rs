//! The log region's header and directory: durable changes, and T19's refusals.

mod common;

use std::cell::RefCell;
use std::rc::Rc;

use common::{Choices, ID, crc32c, write};
use proptest::prelude::*;
use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::{
    AddError, ChangeError, Class, CreateError, HEADER_BYTES, HEADER_COPY_BYTES, LogKind, LogRegion,
    MEMBERS_MAX, MemberNamespace, NewVolume, OpenError, VOLUMES_MAX, VolumeState, inspect,
};
use riopipe_order::ordering_log::StreamLog;
use riopipe_order::region::{MemRegion, Region, RegionError};

const LEN: usize = 1 << 20;
const UUID: [u8; 16] = [1; 16];
const BOOT: [u8; 16] = [2; 16];
const OWNER: [u8; 16] = [3; 16];
const LEASE_MS: u32 = 45_000;

fn create(kind: LogKind) -> LogRegion<MemRegion> {
    let header = MemRegion::forgetful(HEADER_BYTES);
    LogRegion::create(header, LEN, UUID, BOOT, kind, crc32c).unwrap()
}

fn open(region: MemRegion) -> Result<LogRegion<MemRegion>, OpenError> {
    LogRegion::open(region, LEN, BOOT, crc32c)
}

fn volume(id: u8, streams: u16, slots: u32) -> NewVolume {
    NewVolume {
        id: VolumeId([id; 16]),
        streams,
        slots,
        members: vec![MemberNamespace { member: Member(id), nsid: u32::from(id) + 1 }],
    }
}

fn add(log: &mut LogRegion<MemRegion>, volume: NewVolume) -> Result<(), AddError> {
    log.add_volume(volume, |_, _| Ok(())).map(|_| ())
}

#[test]
fn a_region_is_what_it_was_made() {
    let mut log = create(LogKind::Dax);
    assert_eq!(log.incarnation(), 1);
    let mut formatted = Vec::new();
    let record = log.add_volume(volume(9, 3, 100), |stream, range| {
        formatted.push((stream, range));
        Ok(())
    });
    let record = record.unwrap().clone();
    assert_eq!(record.partition(StreamId(0)).unwrap(), 8192..8192 + 256 + 6400);
    assert_eq!(record.partition(StreamId(1)).unwrap().start, 8192 + 8192);
    assert_eq!(record.partition(StreamId(3)), None);
    assert_eq!(record.extent(), 8192..8192 + 3 * 8192);
    assert_eq!(formatted.len(), 3);
    assert!(formatted.iter().all(|(s, r)| record.partition(*s).as_ref() == Some(r)));
    log.set_generation(record.id, 4, OWNER, LEASE_MS).unwrap();
    let log = open(log.into_region().crash(1)).unwrap();
    let found = log.volume(record.id).unwrap();
    assert_eq!((found.generation, found.state, found.owner), (4, VolumeState::Owned, OWNER));
    assert_eq!(found.members, record.members);
    assert_eq!((found.streams, found.slots, found.offset), (3, 100, 8192));
    assert_eq!(log.incarnation(), 2, "every start is an incarnation of its own (T4)");
    assert_eq!((log.header().uuid, log.header().kind), (UUID, LogKind::Dax));
}

#[test]
fn t25_the_owners_lease_is_kept_with_the_volume() {
    let mut log = create(LogKind::Dax);
    add(&mut log, volume(9, 1, 4)).unwrap();
    let id = VolumeId([9; 16]);
    let kept = |log: LogRegion<MemRegion>| {
        let log = open(log.into_region().crash(1)).unwrap();
        let record = log.volume(id).unwrap();
        let kept = (record.state, record.generation, record.lease_ms);
        (log, kept)
    };
    log.set_generation(id, 4, OWNER, LEASE_MS).unwrap();
    let (mut log, found) = kept(log);
    assert_eq!(found, (VolumeState::Owned, 4, LEASE_MS));
    log.set_state(id, VolumeState::Closed).unwrap();
    log.renew(id, 0).unwrap();
    let (mut log, found) = kept(log);
    assert_eq!(found, (VolumeState::Owned, 4, 0));
    let number = log.header().number;
    log.renew(id, 0).unwrap();
    assert_eq!(log.header().number, number, "nothing to be written");
}

#[test]
fn every_kind_of_medium_is_found_again_as_what_it_was() {
    for kind in [LogKind::File, LogKind::Dax, LogKind::Block, LogKind::Pci] {
        let log = open(create(kind).into_region()).unwrap();
        assert_eq!(log.header().kind, kind);
    }
}

#[test]
fn partitions_hold_logs() {
    let mut whole = MemRegion::new(LEN);
    let header = MemRegion::new(HEADER_BYTES);
    let mut log = LogRegion::create(header, LEN, UUID, BOOT, LogKind::Dax, crc32c).unwrap();
    let new = NewVolume { id: ID.volume, ..volume(1, 2, 16) };
    let origin = Origin { generation: 1, incarnation: log.incarnation() };
    let record = log.add_volume(new, |stream, range| {
        let id = PartitionId { stream, ..ID };
        let mut log = StreamLog::format(MemRegion::new(range.len()), id, 0, crc32c).unwrap();
        log.start(origin, Seq::ZERO).unwrap();
        log.append(&write(u64::from(stream.0) + 1, 1)).unwrap();
        log.fence().unwrap();
        assert_eq!(log.slots(), 16);
        whole.bytes_mut()[range].copy_from_slice(log.into_region().bytes());
        Ok(())
    });
    let record = record.unwrap().clone();
    for stream in [0, 1].map(StreamId) {
        let range = record.partition(stream).unwrap();
        let mut region = MemRegion::new(range.len());
        region.bytes_mut().copy_from_slice(&whole.bytes()[range]);
        let (_, scan) = StreamLog::open(region, PartitionId { stream, ..ID }, crc32c).unwrap();
        assert_eq!(scan.entries[0].attribute.seq, Seq(u64::from(stream.0) + 1));
    }
}

#[test]
fn volumes_fill_gaps_and_report_what_is_missing() {
    let mut log = create(LogKind::Dax);
    let page = 60; // slots that fill one page
    add(&mut log, volume(1, 10, page)).unwrap();
    add(&mut log, volume(2, 20, page)).unwrap();
    add(&mut log, volume(3, 5, page)).unwrap();
    log.remove_volume(VolumeId([2; 16])).unwrap();
    add(&mut log, volume(4, 12, page)).unwrap();
    assert_eq!(log.volume(VolumeId([4; 16])).unwrap().offset as usize, 8192 + 10 * 4096);
    let ids: Vec<u8> = log.header().volumes.iter().map(|v| v.id.0[0]).collect();
    assert_eq!(ids, [1, 4, 3], "in order of place");
    let left = LEN - 8192 - 35 * 4096;
    let error = add(&mut log, volume(5, 300, page)).unwrap_err();
    assert_eq!(error, AddError::TooSmall { need: 300 * 4096, have: left });
    assert_eq!(
        add(&mut log, volume(4, 1, 4)),
        Err(AddError::AlreadyThere { volume: VolumeId([4; 16]) })
    );
    for shape in
        [volume(5, 0, 4), volume(5, 1, 3), NewVolume { members: vec![], ..volume(5, 1, 4) }]
    {
        assert!(matches!(add(&mut log, shape), Err(AddError::Shape { .. })));
    }
    let twice = NewVolume { members: volume(5, 1, 4).members.repeat(2), ..volume(5, 1, 4) };
    assert!(matches!(add(&mut log, twice), Err(AddError::Shape { .. })));
    for id in 5..5 + (VOLUMES_MAX as u8 - 3) {
        add(&mut log, volume(id, 1, 4)).unwrap();
    }
    assert_eq!(add(&mut log, volume(99, 1, 4)), Err(AddError::DirectoryFull));
    assert_eq!(open(log.into_region()).unwrap().header().volumes.len(), VOLUMES_MAX);
}

#[test]
fn a_region_must_have_space_for_something() {
    let made = |header, len| {
        LogRegion::create(MemRegion::new(header), len, UUID, BOOT, LogKind::Dax, crc32c).map(drop)
    };
    for (header, len) in [(HEADER_BYTES, 8192), (HEADER_BYTES, 12280), (HEADER_BYTES - 8, 12288)] {
        let small = CreateError::TooSmall { have: len, need: 12288 };
        assert_eq!(made(header, len), Err(small), "{header} bytes of {len}");
    }
    assert_eq!(made(HEADER_BYTES, 12288), Ok(()), "the smallest");
    assert_eq!(made(12288, 12288), Ok(()), "more than the header may be given");
}

#[test]
fn a_volume_whose_partitions_could_not_be_formatted_is_not_there() {
    let mut log = create(LogKind::Dax);
    let fails = |stream: StreamId, _| match stream.0 {
        2 => Err(riopipe_order::region::RegionError::new("pulled out")),
        _ => Ok(()),
    };
    assert!(matches!(log.add_volume(volume(1, 4, 4), fails), Err(AddError::Region(_))));
    assert_eq!(log.header().volumes, []);
    assert_eq!(open(log.into_region()).unwrap().header().volumes, []);
}

#[test]
fn t8_generations_only_rise_and_survive() {
    let mut log = create(LogKind::Dax);
    add(&mut log, volume(1, 1, 4)).unwrap();
    let id = VolumeId([1; 16]);
    log.set_generation(id, 7, OWNER, LEASE_MS).unwrap();
    for given in [6, 7] {
        let current = 7;
        let error = ChangeError::Generation { volume: id, given, current };
        assert_eq!(log.set_generation(id, given, OWNER, LEASE_MS), Err(error));
    }
    let mut log = open(log.into_region().crash(5)).unwrap();
    assert_eq!(log.volume(id).unwrap().generation, 7);
    let unknown = VolumeId([5; 16]);
    let missing = Err(ChangeError::NoSuchVolume { volume: unknown });
    assert_eq!(log.set_generation(unknown, 1, OWNER, LEASE_MS), missing);
    assert_eq!(log.remove_volume(unknown), missing);
    assert_eq!(log.set_state(unknown, VolumeState::Closed), missing);
    assert_eq!(log.renew(unknown, 1), missing);
}

#[test]
fn t19_every_kind_of_wrong_region_is_distinguished() {
    let blank = MemRegion::new(HEADER_BYTES);
    assert_eq!(open(blank.clone()).unwrap_err(), OpenError::Blank);
    assert_eq!(inspect(&blank, LEN, BOOT, crc32c), Class::Blank);

    let mut other = MemRegion::new(HEADER_BYTES);
    other.bytes_mut().iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7) as u8);
    assert_eq!(open(other.clone()).unwrap_err(), OpenError::NotALog);
    other.bytes_mut()[..4096].fill(0);
    assert_eq!(open(other).unwrap_err(), OpenError::NotALog);

    let good = create(LogKind::Dax).into_region();
    let mut newer = good.clone();
    for copy in newer.bytes_mut().chunks_exact_mut(HEADER_COPY_BYTES) {
        copy[12] = 2;
        let check = crc32c(0, &copy[12..]);
        copy[8..12].copy_from_slice(&check.to_le_bytes());
    }
    assert_eq!(open(newer).unwrap_err(), OpenError::Newer { version: 2 });

    let mut torn = good.clone();
    torn.bytes_mut()[100] ^= 1;
    torn.bytes_mut()[4096 + 100] ^= 1;
    assert!(matches!(open(torn).unwrap_err(), OpenError::Damaged { .. }));

    let moved = LogRegion::open(good.clone(), LEN + 4096, BOOT, crc32c);
    assert!(matches!(moved.unwrap_err(), OpenError::Damaged { .. }));

    let short = MemRegion::new(4096);
    assert_eq!(open(short).unwrap_err(), OpenError::NotALog);
    assert!(open(good).is_ok());
}

/// Puts bytes into both copies of the header, which are whole with them.
fn forge(region: &MemRegion, at: usize, bytes: &[u8]) -> MemRegion {
    let mut region = region.clone();
    for copy in region.bytes_mut()[..HEADER_BYTES].chunks_exact_mut(HEADER_COPY_BYTES) {
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        let check = crc32c(0, &copy[12..]);
        copy[8..12].copy_from_slice(&check.to_le_bytes());
    }
    region
}

#[test]
fn t19_what_no_writer_writes_is_damage_however_whole() {
    let mut log = create(LogKind::Dax);
    add(&mut log, volume(1, 1, 100)).unwrap();
    add(&mut log, volume(2, 1, 100)).unwrap();
    let region = log.into_region();
    let (first, second) = (128, 128 + 248);
    let far = (1u64 << 48) + 4096;
    for (what, at, bytes) in [
        ("written too often", 16, &(1u64 << 62).to_le_bytes()[..]),
        ("too many volumes", 61, &[VOLUMES_MAX as u8 + 1]),
        ("one volume twice", second, &[1; 16]),
        ("no such state", first + 20, &[77]),
        ("too many members", first + 21, &[MEMBERS_MAX as u8 + 1]),
        ("no stream", first + 22, &0u16.to_le_bytes()),
        ("no slot", first + 24, &0u32.to_le_bytes()),
        ("partitions in the header", first + 32, &4096u64.to_le_bytes()),
        ("partitions between pages", first + 32, &8256u64.to_le_bytes()),
        ("partitions in another's", second + 32, &8192u64.to_le_bytes()),
        ("partitions far outside", second + 32, &far.to_le_bytes()),
    ] {
        let found = open(forge(&region, at, bytes));
        assert!(matches!(found, Err(OpenError::Damaged { .. })), "{what}: {found:?}");
    }
    open(forge(&region, first + 20, &[])).expect("only the checksum is new");

    let empty = create(LogKind::Dax).into_region();
    for (len, good) in [(1u64 << 48, true), (far, false)] {
        let region = forge(&empty, 64, &len.to_le_bytes());
        let found = LogRegion::open(region, len as usize, BOOT, crc32c);
        assert_eq!(found.is_ok(), good, "{len} bytes: {found:?}");
    }
}

#[test]
fn a_region_and_a_record_may_be_full() {
    let mut log = create(LogKind::Dax);
    let member = |i| MemberNamespace { member: Member(i as u8), nsid: i as u32 + 1 };
    let members = (0..MEMBERS_MAX).map(member).collect();
    add(&mut log, NewVolume { members, ..volume(1, 127, 100) }).unwrap();
    let reopened = open(log.into_region()).unwrap();
    let record = &reopened.header().volumes[0];
    assert_eq!((record.extent().end, record.members.len()), (LEN, MEMBERS_MAX));
}

#[test]
fn t19_two_whole_header_copies_that_contradict_each_other_are_damage() {
    let with = |id| {
        let mut log = create(LogKind::Dax);
        add(&mut log, volume(id, 1, 16)).unwrap();
        log.into_region()
    };
    let (mut one, other) = (with(1), with(2));
    assert!(matches!(inspect(&one, LEN, BOOT, crc32c), Class::Ours(_)));
    one.bytes_mut()[..HEADER_COPY_BYTES].copy_from_slice(&other.bytes()[..HEADER_COPY_BYTES]);
    let found = inspect(&one, LEN, BOOT, crc32c);
    assert!(
        matches!(found, Class::Damaged { .. }),
        "as often written, and not the same: {found:?}"
    );
}

const NEXT_BOOT: [u8; 16] = [9; 16];

fn in_next_boot(region: &MemRegion) -> Result<LogRegion<MemRegion>, OpenError> {
    LogRegion::open(region.clone(), LEN, NEXT_BOOT, crc32c)
}

#[test]
fn t24_a_file_log_of_another_boot_is_refused_unless_it_was_synced() {
    let mut log = create(LogKind::File);
    add(&mut log, volume(1, 1, 4)).unwrap();
    let id = VolumeId([1; 16]);
    log.set_generation(id, 1, OWNER, LEASE_MS).unwrap();
    let region = log.into_region();
    let error = in_next_boot(&region).unwrap_err();
    assert_eq!(error, OpenError::StaleBoot { volume: id });
    assert!(error.to_string().contains("accept_lost_log"));
    assert!(matches!(inspect(&region, LEN, NEXT_BOOT, crc32c), Class::StaleBoot(_)));

    let mut log = open(region).expect("the same boot: only the process died");
    log.set_state(id, VolumeState::Closed).unwrap();
    let closed = log.into_region();
    let error = in_next_boot(&closed).unwrap_err();
    assert_eq!(error, OpenError::StaleBoot { volume: id }, "its partitions may be older");

    let mut log = open(closed).unwrap();
    log.set_generation(id, 2, OWNER, LEASE_MS).unwrap();
    log.close(|| Ok(())).unwrap();
    assert!(log.header().synced);
    assert!(log.set_state(id, VolumeState::Closed).is_err(), "nothing is stored after the stamp");
    let synced = log.into_region();
    assert!(open(synced.clone()).is_ok());
    let log = in_next_boot(&synced).expect("all of it was written back");
    assert_eq!((log.header().boot, log.header().synced), (NEXT_BOOT, false));
    assert_eq!(log.volume(id).map(|v| (v.generation, v.state)), Some((2, VolumeState::Owned)));
    let served = log.into_region();
    let third = LogRegion::open(served, LEN, [10; 16], crc32c);
    assert_eq!(third.unwrap_err(), OpenError::StaleBoot { volume: id }, "served since");
}

#[test]
fn t24_only_what_its_fences_do_not_keep_is_stamped() {
    for kind in [LogKind::Dax, LogKind::Block, LogKind::Pci] {
        let mut log = create(kind);
        add(&mut log, volume(1, 1, 4)).unwrap();
        log.close(|| panic!("nothing is left to write back")).unwrap();
        assert!(!log.header().synced);
        let region = log.into_region();
        assert!(in_next_boot(&region).is_ok());
        let forged = forge(&region, 62, &[1]);
        assert!(matches!(open(forged), Err(OpenError::Damaged { .. })), "no writer writes that");
    }
    let region = create(LogKind::File).into_region();
    assert!(in_next_boot(&region).is_ok(), "no volume's");
    assert!(open(forge(&region, 62, &[1])).is_ok());
    assert!(matches!(open(forge(&region, 62, &[2])), Err(OpenError::Damaged { .. })));
}

/// A mapped file: fences do nothing for it, and its disk holds the bytes that were written back
/// last.
#[derive(Clone)]
struct Mapped {
    memory: MemRegion,
    disk: Rc<RefCell<MemRegion>>,
    /// How many more write-backs succeed.
    left: u32,
}

impl Region for Mapped {
    fn len(&self) -> usize {
        self.memory.len()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.memory.read(offset, into);
    }
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.memory.write(offset, bytes);
    }
    fn write_word(&mut self, offset: usize, value: u64) {
        self.memory.write_word(offset, value);
    }
    fn fence(&mut self) -> Result<(), RegionError> {
        Ok(())
    }
    fn write_back(&mut self) -> Result<(), RegionError> {
        self.left = self.left.checked_sub(1).ok_or_else(|| RegionError::new("the disk is gone"))?;
        *self.disk.borrow_mut() = self.memory.clone();
        Ok(())
    }
}

/// The stamp is gone from the disk before anything is served, and comes there only after everything
/// else. Checked by cutting off anywhere, and reading the disk.
#[test]
fn t24_the_stamp_is_cleared_first_and_set_last_on_the_disk() {
    let id = VolumeId([1; 16]);
    let mut made = create(LogKind::File);
    add(&mut made, volume(1, 1, 4)).unwrap();
    made.close(|| Ok(())).unwrap();
    let synced = made.into_region();
    let after = |left: u32, close: bool| {
        let disk = Rc::new(RefCell::new(synced.clone()));
        let region = Mapped { memory: synced.clone(), disk: Rc::clone(&disk), left };
        let opened = LogRegion::open(region, LEN, BOOT, crc32c);
        let served = opened.is_ok();
        if let Ok(mut log) = opened {
            log.set_generation(id, 7, OWNER, LEASE_MS).unwrap();
            if close {
                let mut rest = 1;
                let found = log.close(|| {
                    assert!(!matches!(
                        inspect(&*disk.borrow(), LEN, NEXT_BOOT, crc32c),
                        Class::Ours(_)
                    ));
                    rest -= 1;
                    Ok(())
                });
                assert_eq!(rest, 0, "asked once, before the stamp: {found:?}");
            }
        }
        let class = inspect(&*disk.borrow(), LEN, NEXT_BOOT, crc32c);
        (served, matches!(class, Class::Ours(_)))
    };
    assert_eq!(after(0, false), (false, true), "nothing was served, nothing is lost");
    assert_eq!(after(1, false), (false, false), "in the middle of clearing it");
    assert_eq!(after(2, false), (true, false));
    assert_eq!(after(2, true), (true, false), "the stamp did not get there");
    assert_eq!(after(3, true), (true, true), "one copy is enough");
    assert_eq!(after(4, true), (true, true));
}

#[test]
fn t24_what_cannot_be_written_back_gets_no_stamp() {
    let mut log = create(LogKind::File);
    add(&mut log, volume(1, 1, 4)).unwrap();
    let failed = log.close(|| Err(RegionError::new("the disk is full")));
    assert!(failed.unwrap_err().to_string().contains("full"));
    assert!(!log.header().synced);
    assert!(in_next_boot(&log.into_region()).is_err());
}

#[test]
fn t19_no_flipped_bit_of_one_copy_loses_anything() {
    let mut log = create(LogKind::Dax);
    add(&mut log, volume(1, 2, 4)).unwrap();
    log.set_generation(VolumeId([1; 16]), 3, OWNER, LEASE_MS).unwrap();
    let truth = log.header().volumes.clone();
    let region = log.into_region();
    for bit in (0..HEADER_BYTES * 8).step_by(13) {
        let mut damaged = region.clone();
        damaged.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
        let log = open(damaged).unwrap_or_else(|error| panic!("bit {bit}: {error}"));
        assert_eq!(log.header().volumes, truth, "bit {bit}");
        let repaired = log.into_region();
        assert_eq!(
            repaired.bytes()[..4096],
            repaired.bytes()[4096..],
            "bit {bit}: and it is repaired"
        );
    }
}

/// A region that reports the offsets of its writes.
#[derive(Debug)]
struct Watched(MemRegion, Rc<RefCell<Vec<usize>>>);

impl Region for Watched {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.0.read(offset, into);
    }
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.1.borrow_mut().push(offset);
        self.0.write(offset, bytes);
    }
    fn write_word(&mut self, offset: usize, value: u64) {
        self.0.write_word(offset, value);
    }
    fn fence(&mut self) -> Result<(), RegionError> {
        self.0.fence()
    }
}

#[test]
fn t19_the_newest_header_copy_is_written_over_last() {
    let mut log = create(LogKind::Dax);
    add(&mut log, volume(1, 1, 16)).unwrap();
    let older = log.into_region();
    let newer = open(older.clone()).unwrap().into_region();
    for (first, last) in [(0, HEADER_COPY_BYTES), (HEADER_COPY_BYTES, 0)] {
        let copy = first..first + HEADER_COPY_BYTES;
        let mut damaged = newer.clone();
        damaged.bytes_mut()[first + 50] ^= 1;
        let mut interrupted = newer.clone();
        interrupted.bytes_mut()[copy.clone()].copy_from_slice(&older.bytes()[copy]);
        for region in [damaged, interrupted] {
            let writes = Rc::new(RefCell::new(Vec::new()));
            let region = Watched(region, Rc::clone(&writes));
            LogRegion::open(region, LEN, BOOT, crc32c).unwrap();
            assert_eq!(*writes.borrow(), [first, last], "a crash in between leaves the newest");
        }
    }
}

#[test]
fn a_failed_fence_is_for_good() {
    let mut region = MemRegion::forgetful(HEADER_BYTES);
    region.fail_fences_after(3);
    let mut log = LogRegion::create(region, LEN, UUID, BOOT, LogKind::Dax, crc32c).unwrap();
    assert!(add(&mut log, volume(1, 1, 4)).is_err());
    assert!(matches!(add(&mut log, volume(2, 1, 4)), Err(AddError::Region(_))));
    assert_eq!(log.header().volumes, [], "what may be lost is not shown");
}

proptest! {
    /// An acknowledged change survives a power cut at any fence. Of a change that was cut off, all
    /// is there or nothing. Twice in a row.
    #[test]
    fn a_crash_in_a_change_leaves_it_done_or_undone(
        choices in proptest::collection::vec(any::<u16>(), 0..60),
    ) {
        let mut choices = Choices::new(choices);
        let mut region = create(LogKind::Dax).into_region();
        let mut truth = Vec::new();
        for _ in 0..6 {
            region.fail_fences_after(choices.below(12) as u64 + 1);
            let before = truth.clone();
            let mut after = None;
            if let Ok(mut log) = LogRegion::open(region.clone(), LEN, BOOT, crc32c) {
                loop {
                    let id = choices.below(4) as u8;
                    let generation = log.volume(VolumeId([id; 16])).map_or(0, |v| v.generation);
                    let done = match choices.below(3) {
                        0 => add(&mut log, volume(id, 1 + u16::from(id), 8)).is_ok(),
                        1 => log.remove_volume(VolumeId([id; 16])).is_ok(),
                        _ => {
                            let id = VolumeId([id; 16]);
                            log.set_generation(id, generation + 1, OWNER, LEASE_MS).is_ok()
                        }
                    };
                    if done {
                        truth = log.header().volumes.clone();
                    } else if choices.below(4) == 0 {
                        break;
                    }
                }
                after = Some(log);
            }
            // Where the header is torn in mid-change, the next opening decides which of the two it
            // was.
            region = after.map_or(region, LogRegion::into_region);
            region = region.crash(choices.below(1 << 16) as u64);
            match inspect(&region, LEN, BOOT, crc32c) {
                Class::Ours(header) => {
                    prop_assert!(header.volumes == truth || header.volumes.len().abs_diff(truth.len()) <= 1);
                    for volume in &header.volumes {
                        let known = truth.iter().find(|v| v.id == volume.id);
                        prop_assert!(known.is_none_or(|known| known.generation <= volume.generation));
                    }
                    truth = header.volumes;
                }
                class => prop_assert!(false, "{class:?} after {before:?}"),
            }
        }
    }

    /// T18/T19: any bytes can be classified without a panic.
    #[test]
    fn t19_any_bytes_are_classified(
        mut damage in proptest::collection::vec((0..HEADER_COPY_BYTES, any::<u8>()), 1..40),
        fix_checksum in any::<bool>(),
    ) {
        let mut log = create(LogKind::File);
        add(&mut log, volume(1, 2, 4)).unwrap();
        let mut region = log.into_region();
        damage.retain(|(at, _)| !(8..12).contains(at));
        for copy in region.bytes_mut().chunks_exact_mut(HEADER_COPY_BYTES) {
            for &(at, byte) in &damage {
                copy[at % 400] = byte;
            }
            if fix_checksum {
                let check = crc32c(0, &copy[12..]);
                copy[8..12].copy_from_slice(&check.to_le_bytes());
            }
        }
        if let Class::Ours(header) = inspect(&region, LEN, BOOT, crc32c) {
            for volume in &header.volumes {
                prop_assert!(volume.extent().start >= HEADER_BYTES && volume.extent().end <= LEN);
            }
        }
        prop_assert_eq!(region.len(), HEADER_BYTES);
    }
}

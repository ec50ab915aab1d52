//! The checks of SPDK's `nvme_compliance`, `bdevio` and `bdevperf`, written anew for the scripted host on
//! real sockets. `docs/testing.md` lists each of them with its test.

mod host;

use host::{Queue, pattern, wait_until};
use riopipe_target::{Config, NamespaceOptions, Running, Target};
use riopipe_testkit::peer::{self, CC_ENABLE, Completion, Digests, HOSTID, HOSTNQN, Sqe};

const INVALID_OPCODE: u16 = 0x01;
const INVALID_FIELD: u16 = 0x02;
const INVALID_NAMESPACE: u16 = 0x0b;
const SEQUENCE_ERROR: u16 = 0x0c;
const SGL_LENGTH_INVALID: u16 = 0x0f;
const LBA_OUT_OF_RANGE: u16 = 0x80;
const COMPARE_FAILED: u16 = 0x285;
const FUSED_FAILED: u16 = 0x09;
const CONNECT_INVALID: u16 = 0x182;

/// A target with namespaces 1 and 3, and the admin queue and controller of a host.
fn admin_queue() -> (Running, Queue, u16) {
    let mut config = Config::on_loopback(&["mem:16M", "mem:16M"]);
    config.namespaces[1].nsid = Some(3);
    let target = Target::start(&config).unwrap();
    let (admin, cntlid) = Queue::admin(&target, Digests::default());
    (target, admin, cntlid)
}

fn get_features(fid: u32) -> Sqe {
    Sqe::new(0x0a, 7, 0).dword(10, fid)
}

fn refused(done: &Completion) -> (u16, bool) {
    (done.status, done.dnr)
}

#[test]
fn identify_needs_a_buffer_of_its_length_and_is_not_fused() {
    let (target, mut admin, _) = admin_queue();
    let (page, done) = admin.fetch(peer::identify(1, 0x01, 0));
    assert_eq!((page.len(), done.status), (4096, 0));
    for len in [0, 1024, 4095] {
        let done = admin.call(peer::identify(2, 0x01, 0).transport(len), &[]);
        assert_eq!(refused(&done), (SGL_LENGTH_INVALID, true), "{len}");
    }
    for half in [Sqe::first_half, Sqe::second_half] {
        let done = admin.call(half(peer::identify(3, 0x01, 0)), &[]);
        assert_eq!(refused(&done), (INVALID_FIELD, true));
    }
    assert_eq!(admin.fetch(peer::identify(4, 0x01, 0)).1.status, 0, "the queue goes on");
    target.stop().unwrap();
}

#[test]
fn queues_are_made_by_connect_alone() {
    let (target, mut admin, cntlid) = admin_queue();
    let mut io = Queue::io(&target, Digests::default(), cntlid, 1);
    // Delete and create a submission queue and a completion queue: the admin queues, those of the
    // host, and others.
    for opcode in [0x00, 0x01, 0x04, 0x05] {
        for qid in [0, 1, 2, 0xffff] {
            let sqe = Sqe::new(opcode, 5, 0).dword(10, qid | 7 << 16).dword(11, 1 | 1 << 16);
            let done = admin.call(sqe, &[]);
            assert_eq!(refused(&done), (INVALID_OPCODE, true), "{opcode:#x} of {qid}");
        }
    }
    assert_eq!(io.fetch(peer::read(1, 1, 0, 1)).1.status, 0, "no queue has gone");
    target.stop().unwrap();
}

#[test]
fn a_host_connects_as_many_queues_as_it_was_granted_and_no_more() {
    let (target, mut admin, cntlid) = admin_queue();
    let counts = admin.call(get_features(0x07), &[]).result;
    let granted = (counts as u16 + 1).min((counts >> 16) as u16 + 1);
    let connect = |qid: u16| {
        let mut queue = Queue::open(target.addresses()[0], Digests::default());
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        // The smallest queue: two entries.
        let done = queue.call(peer::connect(0, qid, 1, 0), &data);
        (queue, done)
    };
    let mut queues: Vec<Queue> = Vec::new();
    for qid in 1..=granted {
        let (mut queue, done) = connect(qid);
        assert_eq!(done.status, 0, "queue {qid} of {granted}");
        assert_eq!(queue.fetch(peer::read(1, 1, 0, 1)).1.status, 0);
        queues.push(queue);
    }
    let (_, done) = connect(granted + 1);
    assert_eq!(refused(&done), (CONNECT_INVALID, true));
    assert_eq!(done.result, 42, "the queue id");
    // After an I/O queue exists, the number stays.
    let set = Sqe::new(0x09, 7, 0).dword(10, 0x07).dword(11, 0x0080_0080);
    assert_eq!(admin.call(set, &[]).status, SEQUENCE_ERROR);
    assert_eq!(admin.call(set.dword(11, 0xffff_ffff), &[]).status, INVALID_FIELD);
    for mut queue in queues {
        assert_eq!(queue.fetch(peer::read(1, 1, 0, 1)).1.status, 0);
    }
    target.stop().unwrap();
}

#[test]
fn queues_of_another_size_than_announced_are_refused() {
    let (target, mut admin, cntlid) = admin_queue();
    let capabilities = admin.call(peer::property_get(1, 0x00, true), &[]).result;
    // CAP.MQES is 0's based, as SQSIZE is.
    let largest = capabilities as u16;
    for (size, status) in [(0, CONNECT_INVALID), (largest + 1, CONNECT_INVALID), (largest, 0)] {
        let mut queue = Queue::open(target.addresses()[0], Digests::default());
        let data = peer::connect_data(target.subnqn(), HOSTNQN, HOSTID, cntlid);
        let done = queue.call(peer::connect(0, 1, size, 0), &data);
        assert_eq!(done.status, status, "{size} of {largest}");
        if status != 0 {
            assert_eq!(done.result, 44, "the queue size");
        }
    }
    target.stop().unwrap();
}

#[test]
fn features_that_every_controller_has_can_be_read() {
    let (target, mut admin, _) = admin_queue();
    // Arbitration, power management, temperature threshold, error recovery, number of queues, write
    // atomicity, asynchronous events, keep alive timer.
    for fid in [0x01, 0x02, 0x04, 0x05, 0x07, 0x0a, 0x0b, 0x0f] {
        assert_eq!(admin.call(get_features(fid), &[]).status, 0, "{fid:#x}");
    }
    // Interrupts belong to PCI Express. None of the behaviours that Host Behavior Support enables is
    // announced.
    for fid in [0x08, 0x09, 0x16] {
        let done = admin.call(get_features(fid).transport(512), &[]);
        assert_eq!(refused(&done), (INVALID_FIELD, true), "{fid:#x}");
    }
    let set = Sqe::new(0x09, 7, 0).dword(10, 0x07).dword(11, 0xffff_ffff);
    assert_eq!(refused(&admin.call(set, &[])), (INVALID_FIELD, true));
    let capabilities = admin.call(peer::property_get(1, 0x00, true), &[]);
    assert_eq!(capabilities.status, 0);
    target.stop().unwrap();
}

#[test]
fn identify_distinguishes_ids_of_namespaces() {
    let (target, mut admin, _) = admin_queue();
    let (controller, _) = admin.fetch(peer::identify(1, 0x01, 0));
    assert_eq!(controller[256] & 1 << 3, 0, "OACS: no Namespace Management");
    for nsid in [0, 4, 0xffff_ffff] {
        let done = admin.call(peer::identify(2, 0x00, nsid), &[]);
        assert_eq!(refused(&done), (INVALID_NAMESPACE, true), "{nsid:#x}");
    }
    let (page, done) = admin.fetch(peer::identify(3, 0x00, 3));
    assert_eq!(done.status, 0);
    let u16_at = |at: usize| usize::from(u16::from_le_bytes([page[at], page[at + 1]])) + 1;
    if page[24] & 1 << 4 != 0 {
        // NPWG and NOWS in blocks, MDTS in pages of 4096 bytes.
        let (granularity, size, most) = (u16_at(64), u16_at(72), 1 << controller[77]);
        assert!(granularity <= most && size <= most && size % granularity == 0);
    }
    let (page, done) = admin.fetch(peer::identify(4, 0x00, 2));
    assert_eq!((done.status, page), (0, vec![0; 4096]), "inactive");
    target.stop().unwrap();
}

#[test]
fn log_pages_that_every_controller_has_come_whole_and_in_parts() {
    let (target, mut admin, _) = admin_queue();
    for (lid, len) in [(0x01, 64), (0x02, 512), (0x03, 512)] {
        let (page, done) = admin.fetch(peer::get_log(1, lid, 0, len));
        assert_eq!((page.len(), done.status), (len as usize, 0), "{lid:#x}");
    }
    let (whole, _) = admin.fetch(peer::get_log(2, 0x03, 0, 512));
    let done = admin.call(peer::get_log(3, 0x03, 516, 512), &[]);
    assert_eq!(refused(&done), (INVALID_FIELD, true), "beyond the page");
    let (part, done) = admin.fetch(peer::get_log(4, 0x03, 4, 512));
    assert_eq!((done.status, &part[..508], &part[508..]), (0, &whole[4..], &[0; 4][..]));
    target.stop().unwrap();
}

/// A drive of a target, over one I/O queue.
struct Disk {
    target: Running,
    admin: Queue,
    io: Queue,
    cntlid: u16,
    /// Bytes of a logical block.
    lba_size: usize,
    /// Logical blocks.
    blocks: u64,
    _folder: tempfile::TempDir,
}

const MIB: usize = 1 << 20;
const DISK_BYTES: usize = 16 * MIB;

impl Disk {
    /// Calls a check for each kind of drive.
    fn each(check: impl Fn(&mut Self)) {
        for (drive, lba_size) in
            [("mem:16M", 4096), ("file", 4096), ("ssd:optane,size=16M", 4096), ("mem:16M", 512)]
        {
            let folder = tempfile::tempdir().unwrap();
            let file = format!("file:{},size=16M", folder.path().join("d").display());
            let drive = if drive == "file" { file } else { drive.to_owned() };
            let namespace =
                NamespaceOptions { drive, lba_size: Some(lba_size), ..Default::default() };
            let config = Config { namespaces: vec![namespace], ..Config::on_loopback(&[]) };
            let target = Target::start(&config).unwrap();
            let (admin, cntlid) = Queue::admin(&target, Digests::default());
            let io = Queue::io(&target, Digests::default(), cntlid, 1);
            let blocks = (DISK_BYTES / lba_size as usize) as u64;
            let lba_size = lba_size as usize;
            let mut disk = Self { target, admin, io, cntlid, lba_size, blocks, _folder: folder };
            check(&mut disk);
            disk.target.stop().unwrap();
        }
    }

    /// A command of these blocks, with `len` bytes of data by the transport.
    fn sqe(opcode: u8, lba: u64, count: usize, len: usize) -> Sqe {
        let sqe = Sqe::new(opcode, 9, 1).dword(10, lba as u32).dword(11, (lba >> 32) as u32);
        sqe.dword(12, count as u32 - 1).transport(len as u32)
    }

    /// Carries out a command whose data the target asks for, in PDUs of `piece` bytes at most.
    fn send(&mut self, sqe: Sqe, data: &[u8], piece: usize) -> u16 {
        self.io.command(sqe, &[]);
        loop {
            let pdu = self.io.next().expect("an answer");
            if pdu.kind == 0x05 {
                return pdu.completion().status;
            }
            let (tag, from, len) = (pdu.u16(10), pdu.u32(12) as usize, pdu.u32(16) as usize);
            // No PDU is longer than MAXH2CDATA.
            for at in (from..from + len).step_by(piece.min(128 * 1024)) {
                let end = (at + piece.min(128 * 1024)).min(from + len);
                let is_last = end == from + len;
                let part = &data[at..end];
                let pdu = peer::h2c_data(Digests::default(), 9, tag, at as u32, part, is_last);
                self.io.send(&pdu);
            }
        }
    }

    fn write_in(&mut self, lba: u64, data: &[u8], piece: usize) -> u16 {
        let count = data.len() / self.lba_size;
        self.send(Self::sqe(0x01, lba, count, data.len()), data, piece)
    }

    fn write(&mut self, lba: u64, data: &[u8]) -> u16 {
        self.write_in(lba, data, usize::MAX)
    }

    /// Reads blocks; the data of a failed read is what came before the failure.
    fn read(&mut self, lba: u64, count: usize) -> (Vec<u8>, u16) {
        let len = count * self.lba_size;
        self.io.command(Self::sqe(0x02, lba, count, len), &[]);
        let mut data = Vec::new();
        loop {
            let pdu = self.io.next().expect("an answer");
            match pdu.kind {
                0x07 => {
                    assert_eq!(pdu.u32(12) as usize, data.len(), "in order");
                    data.extend(pdu.data);
                }
                _ => return (data, pdu.completion().status),
            }
        }
    }

    /// Blocks of a recognisable content.
    fn content(&self, seed: u8, count: usize) -> Vec<u8> {
        pattern(seed, count * self.lba_size)
    }

    fn assert_content(&mut self, lba: u64, data: &[u8], what: &str) {
        let (read, status) = self.read(lba, data.len() / self.lba_size);
        assert!((status, &read[..]) == (0, data), "{what}: status {status:#x}");
    }

    fn write_and_read(&mut self, lba: u64, count: usize, piece: usize) {
        let data = self.content(lba as u8 ^ count as u8, count);
        assert_eq!(self.write_in(lba, &data, piece), 0, "{count} blocks");
        self.assert_content(lba, &data, "what was written");
    }

    fn zeroes(&mut self, lba: u64, count: usize) -> u16 {
        let sqe = Self::sqe(0x08, lba, count, 0).inline(0);
        self.io.call(sqe, &[]).status
    }
}

#[test]
fn blocks_are_read_back_whatever_their_number_and_their_pieces() {
    Disk::each(|disk| {
        let size = disk.lba_size;
        let over_128k = 128 * 1024 / size + 1;
        for (lba, count) in [(0, 1), (8, 8), (2, over_128k), (0, 30)] {
            // At once, block by block, and all but the last block at once.
            for piece in [usize::MAX, size, (count.max(2) - 1) * size] {
                disk.write_and_read(lba, count, piece);
            }
        }
        // Two writes that overlap by a block.
        let (first, second) = (disk.content(3, 2), disk.content(0xbb, 2));
        assert_eq!(disk.write(0, &first), 0);
        assert_eq!(disk.write(1, &second), 0);
        disk.assert_content(0, &first[..size], "before the overlap");
        disk.assert_content(1, &second, "the later write");
        // In the capsule.
        let data = disk.content(0xa5, 1);
        let sqe = Disk::sqe(0x01, 4, 1, size).inline(size as u32);
        assert_eq!(disk.io.call(sqe, &data).status, 0);
        disk.assert_content(4, &data, "what came in the capsule");
    });
}

#[test]
fn zeroes_are_written_over_any_number_of_blocks() {
    Disk::each(|disk| {
        let size = disk.lba_size;
        let all = disk.content(7, 8 * MIB / size);
        for bytes in [size, MIB, 3 * MIB, 7 * MIB / 2] {
            assert_eq!(disk.write(0, &all), 0);
            assert_eq!(disk.zeroes(0, bytes / size), 0);
            disk.assert_content(0, &vec![0; bytes], "zeroes");
            disk.assert_content((bytes / size) as u64, &all[bytes..bytes + size], "behind them");
        }
    });
}

#[test]
fn what_does_not_fit_the_drive_changes_nothing() {
    Disk::each(|disk| {
        let (size, last) = (disk.lba_size, disk.blocks - 1);
        let before = disk.content(1, 2);
        assert_eq!(disk.write(last - 1, &before), 0);
        disk.write_and_read(2, 1, usize::MAX);
        let kept = disk.read(2, 1).0;
        let data = disk.content(9, 2);
        // A length that is no multiple of the block's.
        for len in [size - 1, size + 1] {
            assert_eq!(disk.send(Disk::sqe(0x01, 2, 1, len), &data, size), SGL_LENGTH_INVALID);
            let done = disk.io.call(Disk::sqe(0x02, 2, 1, len), &[]);
            assert_eq!(done.status, SGL_LENGTH_INVALID);
        }
        disk.assert_content(2, &kept, "after a wrong length");
        // Beyond the end, and so far beyond that the end wraps.
        for lba in [last, last + 1, u64::MAX, u64::MAX - 1] {
            assert_eq!(disk.write(lba, &data), LBA_OUT_OF_RANGE, "{lba:#x}");
            assert_eq!(disk.read(lba, 2), (vec![], LBA_OUT_OF_RANGE), "{lba:#x}");
            assert_eq!(disk.zeroes(lba, 2), LBA_OUT_OF_RANGE, "{lba:#x}");
        }
        disk.assert_content(last - 1, &before, "after writes beyond the end");
        // Up to the end.
        disk.write_and_read(last, 1, usize::MAX);
    });
}

#[test]
fn compare_and_write_is_done_once() {
    Disk::each(|disk| {
        let (old, new) = (disk.content(0xaa, 1), disk.content(0xbb, 1));
        let len = disk.lba_size as u32;
        assert_eq!(disk.write(0, &old), 0);
        for expected in [[0, 0], [COMPARE_FAILED, FUSED_FAILED]] {
            let half = |opcode| Disk::sqe(opcode, 0, 1, 0).inline(len);
            disk.io.command(half(0x05).first_half(), &old);
            disk.io.command(half(0x01).cid(10).second_half(), &new);
            let statuses = [0; 2].map(|_| disk.io.next().unwrap().completion().status);
            assert_eq!(statuses, expected);
            disk.assert_content(0, &new, "the write");
        }
    });
}

#[test]
fn a_block_is_copied() {
    Disk::each(|disk| {
        let data = disk.content(0xaa, 1);
        assert_eq!(disk.write(0, &data), 0);
        let (sqe, list) = peer::copy(9, 1, 1, &[(0, 1)]);
        assert_eq!(disk.io.call(sqe, &list).status, 0);
        disk.assert_content(1, &data, "the copy");
    });
}

#[test]
fn unknown_commands_are_refused_on_both_kinds_of_queue() {
    Disk::each(|disk| {
        // 7Fh is Fabrics; on an I/O queue it has no other meaning than Disconnect.
        for opcode in [0x7f, 0x80, 0xc1, 0xff] {
            let done = disk.io.call(Sqe::new(opcode, 9, 1), &[]);
            assert_eq!((refused(&done), done.result), ((INVALID_OPCODE, true), 0), "{opcode:#x}");
        }
        let done = disk.admin.call(Sqe::new(0xff, 9, 1), &[]);
        assert_eq!(refused(&done), (INVALID_OPCODE, true));
        assert_eq!(disk.admin.fetch(peer::identify(1, 0x01, 0)).1.status, 0);
    });
}

/// Commands in flight at once.
const DEPTH: usize = 32;

/// The block of a write: its number and its round fill it.
fn stamped(lba: u64, round: u64, size: usize) -> Vec<u8> {
    let words = [lba, round, !lba, !round].into_iter().flat_map(u64::to_le_bytes);
    words.cycle().take(size).collect()
}

impl Disk {
    /// Sends writes of these blocks, all at once.
    fn send_stamped(&mut self, lbas: &[u64], round: u64) {
        let mut bytes = Vec::new();
        for (cid, lba) in lbas.iter().enumerate() {
            let data = stamped(*lba, round, self.lba_size);
            let sqe = Self::sqe(0x01, *lba, 1, 0).inline(data.len() as u32).cid(cid as u16);
            bytes.extend(peer::capsule(Digests::default(), &sqe.0, &data));
        }
        self.io.send(&bytes);
    }

    /// Takes the completions of commands that were sent at once, in whatever order they come.
    fn take_completions(&mut self, count: usize) {
        let mut cids: Vec<u16> = Vec::new();
        for _ in 0..count {
            let done = self.io.next().expect("a completion").completion();
            assert_eq!(done.status, 0, "{done:?}");
            cids.push(done.cid);
        }
        cids.sort_unstable();
        assert!(cids.iter().enumerate().all(|(at, cid)| usize::from(*cid) == at), "each once");
    }

    fn assert_stamped(&mut self, lbas: &[u64], rounds: &[u64]) {
        for lba in lbas {
            let (data, status) = self.read(*lba, 1);
            let round = rounds.iter().find(|round| data == stamped(*lba, **round, self.lba_size));
            assert!(status == 0 && round.is_some(), "block {lba} is none of {rounds:?}");
        }
    }

    /// Resets the controller (CC.EN), with what is in flight, and connects its I/O queue again.
    fn reset(&mut self) {
        assert_eq!(self.admin.call(peer::property_set(1, 0x14, 0), &[]).status, 0);
        while self.io.next().is_some() {}
        assert_eq!(self.admin.call(peer::property_set(1, 0x14, CC_ENABLE), &[]).status, 0);
        let data = peer::connect_data(self.target.subnqn(), HOSTNQN, HOSTID, self.cntlid);
        let address = self.target.addresses()[0];
        let io = &mut self.io;
        // The id of the queue is taken until its last operation has come back.
        wait_until(
            || {
                *io = Queue::open(address, Digests::default());
                io.call(peer::connect(0, 1, 127, 0), &data).status == 0
            },
            "the I/O queue is connected again",
        );
    }
}

/// The blocks of a round: all over the drive, none twice.
fn scattered(round: u64, blocks: u64) -> Vec<u64> {
    (0..DEPTH as u64).map(|i| (round * 97 + i * 31) % blocks).collect()
}

#[test]
fn what_was_written_at_depth_is_verified() {
    Disk::each(|disk| {
        for round in 0..20 {
            let lbas = scattered(round, disk.blocks);
            disk.send_stamped(&lbas, round);
            disk.take_completions(lbas.len());
            disk.assert_stamped(&lbas, &[round]);
        }
    });
}

/// A reset in the middle of writes: each block has its old content or its new one, and the host, which
/// sends them again, loses none.
#[test]
fn a_reset_in_the_middle_of_writes_tears_and_loses_none() {
    Disk::each(|disk| {
        let lbas = scattered(1, disk.blocks);
        disk.send_stamped(&lbas, 0);
        disk.take_completions(lbas.len());
        for round in 1..8 {
            disk.send_stamped(&lbas, round);
            disk.reset();
            disk.assert_stamped(&lbas, &[round - 1, round]);
            disk.send_stamped(&lbas, round);
            disk.take_completions(lbas.len());
            disk.assert_stamped(&lbas, &[round]);
        }
        // Without anything in flight.
        disk.reset();
        disk.assert_stamped(&lbas, &[7]);
    });
}

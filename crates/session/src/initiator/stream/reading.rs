//! The reads that a stream has in flight. A read consists of parts: one command for each place on a
//! drive.
//!
//! One read may have several extents. The parts of all extents are sent at once. The reads of a
//! stream are independent of each other: each ends when its own parts have ended.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::digest::Crc32c;
use riopipe_order::attribute::Member;
use riopipe_order::probe::{self, Plant, Rare};
use riopipe_order::topology::Extent;

use super::Purpose;
use super::connection::Connection;
use super::redirections::Part;
use crate::initiator::queue_pair::Data;
use crate::wire;

/// A part of a read: adjacent blocks of one drive.
#[derive(Debug)]
pub(super) struct ReadPart {
    /// The server of the drive.
    pub(super) server: u16,
    /// The drive, by its namespace on the server.
    pub(super) nsid: u32,
    /// The drive.
    pub(super) member: Member,
    /// The first block on the drive, where it is if nothing is redirected.
    pub(super) home: u64,
    /// The first block on the drive: at home, or in the prepare area.
    pub(super) lba: u64,
    /// The number of blocks.
    pub(super) blocks: u32,
    /// The offset of the part in the whole read, bytes.
    pub(super) offset: usize,
    /// The check of a part in the prepare area; `None` at home.
    pub(super) check: Option<PartCheck>,
    /// Whether the part's command has been sent on the present connection.
    pub(super) is_sent: bool,
    /// Whether the part is answered or given up.
    pub(super) has_ended: bool,
}

/// The check of the data of a part in the prepare area: whether the drive still has what was written
/// there.
#[derive(Debug)]
pub(super) struct PartCheck {
    /// The checksums of the blocks that are checked.
    checksums: Vec<Option<u32>>,
    /// The number of bytes that have arrived.
    received: usize,
    /// The checksum of the part of the current block that has arrived.
    checksum: u32,
    /// A block has another content.
    is_lost: bool,
}

impl PartCheck {
    /// The check of the blocks with these checksums. `None` if there are none: the part is at home.
    pub(super) fn new(checksums: Vec<Option<u32>>) -> Option<Self> {
        let (received, checksum, is_lost) = (0, 0, false);
        (!checksums.is_empty()).then_some(Self { checksums, received, checksum, is_lost })
    }

    /// Takes in bytes of the part that have arrived, from `offset` on.
    fn add(&mut self, offset: usize, mut bytes: &[u8], crc32c: Crc32c) {
        // The data of a command arrives in order.
        self.is_lost |= offset != self.received;
        while !bytes.is_empty() {
            let in_block = wire::BLOCK_BYTES - self.received % wire::BLOCK_BYTES;
            let (now, later) = bytes.split_at(in_block.min(bytes.len()));
            self.checksum = crc32c(self.checksum, now);
            self.received += now.len();
            bytes = later;
            if now.len() == in_block {
                let block = (self.received - 1) / wire::BLOCK_BYTES;
                let due = self.checksums.get(block).copied().unwrap_or_default();
                self.is_lost |= due.is_some_and(|due| due != self.checksum);
                self.checksum = 0;
            }
        }
    }

    /// Forgets what has arrived: the command is sent again.
    const fn begin(&mut self) {
        (self.received, self.checksum, self.is_lost) = (0, 0, false);
    }

    /// Whether the drive has lost what was written there.
    fn has_failed(&self) -> bool {
        self.is_lost || self.received != self.checksums.len() * wire::BLOCK_BYTES
    }
}

/// A part of a read that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPartFailure {
    /// The place of the part: bytes from the start of the read.
    pub offset: usize,
    /// The status that the target sent.
    pub status: Status,
}

/// The slot of a read among the reads of its stream. A slot has one read at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadSlot(pub u16);

/// The read of a slot, as commands for the drives on which its blocks lie.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The number of the read. It separates answers for this read from late answers for an earlier
    /// one of the slot that was given up.
    number: u32,
    pub(super) parts: Vec<ReadPart>,
    /// The number of parts whose command is still to be sent.
    unsent_count: usize,
    /// The number of parts that have not ended.
    outstanding_count: usize,
    /// The part that failed first.
    first_failure: Option<ReadPartFailure>,
    /// How often streams had rolled back redirected blocks when the places of the parts were found.
    pub(super) roll_backs: u64,
}

impl Reading {
    /// The index of the part that `server` has answered; `None` if the answer belongs to an earlier
    /// read, or the part has ended.
    fn find_part(&self, number: u32, part: u32, server: u16) -> Option<usize> {
        let index = part as usize;
        let part = self.parts.get(index)?;
        let is_answered = self.number == number && part.server == server;
        if is_answered && !part.has_ended { Some(index) } else { None }
    }

    /// Begins a new read, without parts. An earlier one that has not ended is given up.
    fn begin(&mut self) {
        self.number = self.number.wrapping_add(1);
        self.parts.clear();
        self.first_failure = None;
        self.unsent_count = 0;
        self.outstanding_count = 0;
    }

    /// Adds a part to the read.
    pub(super) fn add(&mut self, part: ReadPart) {
        self.parts.push(part);
        self.unsent_count += 1;
        self.outstanding_count += 1;
    }

    /// Takes in data of a part, from `offset` bytes of the part on.
    #[inline]
    pub(super) fn check_data(&mut self, index: usize, offset: usize, bytes: &[u8], crc32c: Crc32c) {
        if let Some(check) = &mut self.parts[index].check {
            check.add(offset, bytes, crc32c);
        }
    }

    /// Ends a part with the status of its command.
    fn end_part(&mut self, index: usize, mut status: Status) {
        let part = &mut self.parts[index];
        if part.has_ended {
            return;
        }
        if status.is_ok()
            && part.check.as_ref().is_some_and(PartCheck::has_failed)
            && !probe::is_bug_planted(Plant::HoraeReadLost)
            // This one would be hidden by the check.
            && !probe::is_bug_planted(Plant::HoraeAreaReusedEarly)
        {
            // A FLUSH has failed, and the stream that has written there does not know it yet.
            probe::count_rare(Rare::RedirectedLost);
            status = Status::UNRECOVERED_READ;
        }
        part.has_ended = true;
        if !part.is_sent {
            // The part was given up before its command was sent.
            part.is_sent = true;
            self.unsent_count -= 1;
        }
        self.outstanding_count -= 1;
        if !status.is_ok() && self.first_failure.is_none() {
            self.first_failure = Some(ReadPartFailure { offset: part.offset, status });
        }
    }

    /// Ends all parts of `server`, from which no answer will arrive any more.
    fn give_up_server(&mut self, server: u16) {
        for index in 0..self.parts.len() {
            if self.parts[index].server == server {
                self.end_part(index, Status::ABORTED_BY_HOST);
            }
        }
    }

    /// Handles the loss of the connection to `server`: the parts that have no answer must be sent
    /// again.
    fn send_again(&mut self, server: u16) {
        for part in &mut self.parts {
            if part.server == server && part.is_sent && !part.has_ended {
                part.is_sent = false;
                if let Some(check) = &mut part.check {
                    check.begin();
                }
                self.unsent_count += 1;
            }
        }
    }

    /// Finds the places of the parts for `server` that are not sent again.
    fn place_again(&mut self, server: u16, place: &mut dyn FnMut(&Extent) -> Vec<Part>) {
        for index in 0..self.parts.len() {
            let ReadPart { member, home, blocks, nsid, offset, is_sent, .. } = self.parts[index];
            if is_sent || self.parts[index].server != server {
                continue;
            }
            let mut places = place(&Extent { member, lba: home, blocks, offset: 0 }).into_iter();
            let Some(first) = places.next() else { continue };
            probe::count_rare(Rare::ReadPlacedAgain);
            (self.parts[index].lba, self.parts[index].blocks) = (first.lba, first.blocks);
            self.parts[index].check = PartCheck::new(first.checksums);
            for Part { lba, blocks, offset: further, checksums } in places {
                let home = home + u64::from(further);
                let offset = offset + further as usize * wire::BLOCK_BYTES;
                let (is_sent, has_ended) = (false, false);
                self.add(ReadPart {
                    server,
                    nsid,
                    member,
                    home,
                    lba,
                    blocks,
                    offset,
                    check: PartCheck::new(checksums),
                    is_sent,
                    has_ended,
                });
            }
        }
    }

    /// Sends the parts for `server`, if it may be read now (promise P9), until `depth` commands are
    /// in flight there. Returns false if a part has to wait.
    fn send_parts<P: AsRef<[u8]> + Clone>(
        &mut self,
        slot: ReadSlot,
        server: u16,
        connection: &mut Connection<P>,
        depth: usize,
    ) -> bool {
        for (index, part) in self.parts.iter_mut().enumerate() {
            if part.is_sent || part.server != server {
                continue;
            }
            if !connection.has_space_for_read(depth) || !connection.participant.begin_read() {
                // A stream replays on the server, or will do so. The part is sent later.
                return false;
            }
            let sqe = Sqe::read(part.nsid, part.lba, part.blocks);
            let data = Data::Read(part.blocks * wire::BLOCK_BYTES as u32);
            let purpose = Purpose::Read { slot, number: self.number, part: index as u32 };
            if connection.queue.submit(sqe, purpose, data, &mut connection.outbox).is_err() {
                if connection.reads_in_flight == 0 {
                    connection.participant.end_read();
                }
                return false;
            }
            connection.reads_in_flight += 1;
            part.is_sent = true;
            self.unsent_count -= 1;
        }
        true
    }
}

/// The reads of a stream, by slot.
#[derive(Debug, Default)]
pub(super) struct Readings {
    slots: Vec<Reading>,
    /// The slots of the reads with parts whose command is still to be sent, in the order in which
    /// the reads began. After the loss of a connection its reads are at the end.
    unsent: Vec<ReadSlot>,
    /// The number of reads that have ended since the start, without those that were given up.
    ended_count: u64,
}

impl Readings {
    /// Begins a read in a slot, without parts. An earlier read of the slot is given up.
    pub(super) fn begin(&mut self, slot: ReadSlot) -> &mut Reading {
        self.give_up(slot);
        &mut self.slots[usize::from(slot.0)]
    }

    /// Lets the parts be sent that were added to the read of a slot.
    pub(super) fn queue(&mut self, slot: ReadSlot) {
        if self.slots[usize::from(slot.0)].unsent_count > 0 {
            self.unsent.push(slot);
        }
    }

    /// Gives up the read of a slot: later answers for it are dropped.
    pub(super) fn give_up(&mut self, slot: ReadSlot) {
        let index = usize::from(slot.0);
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Reading::default);
        }
        if self.slots[index].unsent_count > 0 {
            self.unsent.retain(|unsent| *unsent != slot);
        }
        self.slots[index].begin();
    }

    /// The read that `server` has answered, and the index of its part; `None` if the answer belongs
    /// to an earlier read, or the part has ended.
    #[inline]
    pub(super) fn find_part(
        &mut self,
        slot: ReadSlot,
        number: u32,
        part: u32,
        server: u16,
    ) -> Option<(&mut Reading, usize)> {
        let reading = self.slots.get_mut(usize::from(slot.0))?;
        let index = reading.find_part(number, part, server)?;
        Some((reading, index))
    }

    /// Ends the part that `server` has answered; see [`find_part`](Self::find_part).
    pub(super) fn end_part(
        &mut self,
        slot: ReadSlot,
        number: u32,
        part: u32,
        server: u16,
        status: Status,
    ) {
        let Some((reading, index)) = self.find_part(slot, number, part, server) else { return };
        reading.end_part(index, status);
        if reading.outstanding_count == 0 {
            self.ended_count += 1;
        }
    }

    /// The number of reads that have ended since the start, without those that were given up.
    pub(super) const fn ended_count(&self) -> u64 {
        self.ended_count
    }

    /// Whether the read of a slot is in flight.
    pub(super) fn is_in_flight(&self, slot: ReadSlot) -> bool {
        let reading = self.slots.get(usize::from(slot.0));
        reading.is_some_and(|reading| reading.outstanding_count > 0)
    }

    /// The failure of the read of a slot; `None` if no part has failed.
    pub(super) fn failure(&self, slot: ReadSlot) -> Option<ReadPartFailure> {
        self.slots.get(usize::from(slot.0))?.first_failure
    }

    /// Whether a command is still to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Whether a command is still to be sent to `server`.
    pub(super) fn has_unsent_for(&self, server: u16) -> bool {
        self.unsent.iter().any(|slot| {
            let mut parts = self.slots[usize::from(slot.0)].parts.iter();
            parts.any(|part| !part.is_sent && part.server == server)
        })
    }

    /// Ends all parts of `server`, from which no answer will arrive any more.
    pub(super) fn give_up_server(&mut self, server: u16) {
        for reading in self.slots.iter_mut().filter(|reading| reading.outstanding_count > 0) {
            reading.give_up_server(server);
            self.ended_count += u64::from(reading.outstanding_count == 0);
        }
        self.drop_sent();
    }

    /// Handles the loss of the connection to `server`: the parts that have no answer must be sent
    /// again.
    pub(super) fn send_again(&mut self, server: u16) {
        for (reading, slot) in self.slots.iter_mut().zip(0..) {
            let unsent_before = reading.unsent_count;
            reading.send_again(server);
            if unsent_before == 0 && reading.unsent_count > 0 {
                self.unsent.push(ReadSlot(slot));
            }
        }
    }

    /// Finds the places of the parts for `server` that are not sent again, for each read whose
    /// places were found when streams had rolled back less often than now. `place` gets the slot of
    /// the read.
    pub(super) fn place_again(
        &mut self,
        server: u16,
        roll_backs: u64,
        place: &mut dyn FnMut(ReadSlot, &Extent) -> Vec<Part>,
    ) {
        for slot in &self.unsent {
            let reading = &mut self.slots[usize::from(slot.0)];
            if reading.roll_backs != roll_backs {
                reading.place_again(server, &mut |extent| place(*slot, extent));
            }
        }
    }

    /// Sends the parts for `server`, if it may be read now (promise P9), until `depth` commands are
    /// in flight there.
    pub(super) fn send_parts<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: u16,
        connection: &mut Connection<P>,
        depth: usize,
    ) {
        for slot in &self.unsent {
            let reading = &mut self.slots[usize::from(slot.0)];
            if !reading.send_parts(*slot, server, connection, depth) {
                break;
            }
        }
        self.drop_sent();
    }

    /// Drops the reads that have no part to send any more from the list.
    fn drop_sent(&mut self) {
        let slots = &self.slots;
        self.unsent.retain(|slot| slots[usize::from(slot.0)].unsent_count > 0);
    }
}

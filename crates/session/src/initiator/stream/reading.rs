//! The reads that a stream has in flight, in parts: one for each place on a drive.
//!
//! One call of the stream's owner may read several extents. Their parts are all sent at once.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};

use super::Purpose;
use super::connection::Connection;
use crate::initiator::queue_pair::Data;
use crate::wire;

/// A part of a read: adjacent blocks of one drive.
#[derive(Debug)]
pub(super) struct ReadPart {
    pub(super) server: u16,
    pub(super) nsid: u32,
    pub(super) lba: u64,
    pub(super) blocks: u32,
    /// Its offset in the whole read, bytes.
    pub(super) offset: usize,
    /// Whether its command has been sent on the present connection.
    pub(super) sent: bool,
    /// Whether it is answered or given up.
    pub(super) ended: bool,
}

/// A part of a read that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPartFailure {
    /// The place of the part: bytes from the start of the read.
    pub offset: usize,
    /// The status that the target sent.
    pub status: Status,
}

/// The read of a stream that is in flight, as commands for the drives on which its blocks lie.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The number of the call, so that a late reply for a read that was given up is not taken for a
    /// reply for a later read.
    pub(super) number: u32,
    /// One command for each.
    pub(super) parts: Vec<ReadPart>,
    /// The number of parts whose command is still to be sent.
    pub(super) unsent: usize,
    /// The number of parts that have not ended.
    pub(super) outstanding: usize,
    /// The first part that failed.
    pub(super) failed: Option<ReadPartFailure>,
}

impl Reading {
    /// The index of the part that `server` has answered; `None` if the answer belongs to an earlier
    /// read, or the part has ended.
    pub(super) fn find_part(&self, number: u32, part: u32, server: u16) -> Option<usize> {
        let index = part as usize;
        let part = self.parts.get(index)?;
        let belongs = self.number == number && part.server == server;
        (belongs && !part.ended).then_some(index)
    }

    /// Begins a new read, without parts. An earlier one that has not ended is given up.
    pub(super) fn begin(&mut self) {
        self.number = self.number.wrapping_add(1);
        self.parts.clear();
        self.failed = None;
        self.unsent = 0;
        self.outstanding = 0;
    }

    /// Adds a part to the read.
    pub(super) fn add(&mut self, part: ReadPart) {
        self.parts.push(part);
        self.unsent += 1;
        self.outstanding += 1;
    }

    /// Ends a part with the status of its command.
    pub(super) fn end_part(&mut self, index: usize, status: Status) {
        let part = &mut self.parts[index];
        if core::mem::replace(&mut part.ended, true) {
            return;
        }
        if !core::mem::replace(&mut part.sent, true) {
            self.unsent -= 1;
        }
        self.outstanding -= 1;
        if !status.is_ok() && self.failed.is_none() {
            self.failed = Some(ReadPartFailure { offset: part.offset, status });
        }
    }

    /// Ends all parts of `server`, from which no answer will arrive any more.
    pub(super) fn give_up_server(&mut self, server: u16) {
        for index in 0..self.parts.len() {
            if self.parts[index].server == server {
                self.end_part(index, Status::ABORTED_BY_HOST);
            }
        }
    }

    /// Marks the parts of `server` that have not ended to be sent again, after the connection was
    /// lost.
    pub(super) fn send_again(&mut self, server: u16) {
        for part in &mut self.parts {
            if part.server == server && !part.ended && core::mem::take(&mut part.sent) {
                self.unsent += 1;
            }
        }
    }

    /// Sends the parts for `server`, if it may be read now (P9).
    pub(super) fn send_parts<P: AsRef<[u8]> + Clone>(
        &mut self,
        server: u16,
        connection: &mut Connection<P>,
    ) {
        for (index, part) in self.parts.iter_mut().enumerate() {
            if part.sent || part.server != server {
                continue;
            }
            if !connection.participant.begin_read() {
                return;
            }
            let sqe = Sqe::read(part.nsid, part.lba, part.blocks);
            let data = Data::Read(part.blocks * wire::BLOCK_BYTES as u32);
            let tag = Purpose::Read { number: self.number, part: index as u32 };
            if connection.queue.submit(sqe, tag, data, &mut connection.outbox).is_err() {
                if connection.reads_in_flight == 0 {
                    connection.participant.end_read();
                }
                return;
            }
            connection.reads_in_flight += 1;
            part.sent = true;
            self.unsent -= 1;
        }
    }
}

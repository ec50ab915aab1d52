//! The requests of a new owner, or of one that comes back, to the target.

use std::ops::Range;

use riopipe_order::attribute::{Flags, Seq, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::log_region::{Class, HEADER_BYTES, LogKind, LogRegion, RegionHeader, inspect};
use riopipe_session::target::Volumes;
use riopipe_session::wire::list::{PAGE_BYTES_MAX, Page, SETTLE_LEN, Settle, SettleStream};
use riopipe_session::wire::{self, Claim, VolumeStatus};

use super::{
    BOOT, LOG_LEN, Owner, Parts, VOLUME, World, attribute, block, crc, identity, ordered,
    riopipe_bytes,
};
use crate::peer::{Completion, Sqe};

/// Another host.
pub(crate) const RIVAL: &str = "nqn.2014-08.org.nvmexpress:uuid:rival";
pub(crate) const RIVAL_ID: [u8; 16] = *b"scripted-host-02";

/// The header of a log.
fn header_of(log: &Parts) -> RegionHeader {
    match inspect(&log.part(0..HEADER_BYTES), LOG_LEN, BOOT, crc) {
        Class::Ours(header) => header,
        other => panic!("{other:?}"),
    }
}

impl World {
    /// Binds to a stream of [`VOLUME`] to resume with the content of its log.
    pub(crate) fn bind_again(
        &mut self,
        io: usize,
        stream: u16,
        generation: u32,
        released: u64,
    ) -> Completion {
        let sqe = wire::resume_command(VOLUME, StreamId(stream), generation, Seq(released));
        self.call(io, riopipe_bytes(&sqe).cid(61), &[])
    }

    /// The target's state of [`VOLUME`].
    pub(crate) fn status(&mut self, admin: usize) -> VolumeStatus {
        self.status_of(admin, VOLUME)
    }

    pub(crate) fn status_of(&mut self, admin: usize, volume: VolumeId) -> VolumeStatus {
        let sqe = riopipe_bytes(&wire::status_command(volume)).cid(51);
        let (data, _) = self.fetch(admin, sqe.transport(wire::STATUS_LEN as u32));
        VolumeStatus::decode(&data).unwrap()
    }

    /// A command that may bring data: the data, or the status of its refusal.
    pub(crate) fn ask(&mut self, at: usize, sqe: Sqe) -> Result<Vec<u8>, u16> {
        self.command(at, sqe, &[]);
        let first = self.next(at).expect("an answer");
        if first.kind != 0x07 {
            return Err(first.completion().status);
        }
        assert_eq!(self.next(at).expect("an answer").completion().status, 0);
        Ok(first.data)
    }

    /// One page of a stream's list.
    pub(crate) fn page(
        &mut self,
        admin: usize,
        stream: u16,
        from: u64,
        len: usize,
    ) -> Result<Page, u16> {
        let sqe = wire::list_command(VOLUME, StreamId(stream), Position(from), len);
        let data = self.ask(admin, riopipe_bytes(&sqe).cid(53).transport(len as u32))?;
        assert_eq!(data.len(), len);
        Ok(Page::decode(&data).expect("a page"))
    }

    /// All of a stream's list.
    pub(crate) fn list(&mut self, admin: usize, stream: u16) -> Result<Page, u16> {
        self.page(admin, stream, 0, PAGE_BYTES_MAX)
    }

    /// The list of the stream that a queue carries.
    pub(crate) fn own_list(&mut self, io: usize) -> Result<Page, u16> {
        self.own_page(io, 0, PAGE_BYTES_MAX)
    }

    /// One page of it.
    pub(crate) fn own_page(&mut self, io: usize, from: u64, len: usize) -> Result<Page, u16> {
        let sqe = wire::own_list_command(Position(from), len);
        let data = self.ask(io, riopipe_bytes(&sqe).cid(54).transport(len as u32))?;
        Ok(Page::decode(&data).expect("a page"))
    }

    /// Settles streams of [`VOLUME`]: each with k and whether the entries beyond are kept.
    pub(crate) fn settle(
        &mut self,
        admin: usize,
        generation: u32,
        streams: &[(u16, u64, bool)],
    ) -> u16 {
        let one = |&(stream, k, keep): &(u16, u64, bool)| SettleStream {
            stream: StreamId(stream),
            keep,
            k: Seq(k),
            tag: 100 + k,
        };
        let settle =
            Settle { volume: VOLUME, generation, streams: streams.iter().map(one).collect() };
        let sqe = riopipe_bytes(&wire::settle_command()).cid(55).inline(SETTLE_LEN as u32);
        self.call(admin, sqe, &settle.encode()).status
    }

    /// The target's process dies and another begins. Connections and operations in flight are gone.
    /// Drives and the fenced part of the log are as they were.
    pub(crate) fn restart(self, seed: u64) -> Self {
        let namespaces = self.host.shared.namespaces();
        let volatile: Vec<bool> = namespaces.iter().map(|ns| ns.config.volatile).collect();
        self.restart_with(&volatile, seed)
    }

    /// The same, with drives that have or have not a volatile cache now.
    pub(crate) fn restart_with(self, volatile: &[bool], seed: u64) -> Self {
        let Self { host, lease_ms, .. } = self;
        let mut w = Self::with(volatile, identity(), host.parts.crash(seed));
        for (new, old) in w.host.drives.iter_mut().zip(host.drives) {
            new.blocks = old.blocks;
        }
        w.lease_ms = lease_ms;
        w
    }

    /// The target is started again on the same drives, in another boot that has lost the log.
    pub(crate) fn restart_with_lost_log(self, seed: u64) -> Self {
        let namespaces = self.host.shared.namespaces();
        let volatile: Vec<bool> = namespaces.iter().map(|ns| ns.config.volatile).collect();
        let parts = self.host.parts.crash(seed);
        let header = header_of(&parts);
        let mut w = Self::over(&volatile, identity(), parts, Volumes::with_lost_log(header, crc));
        for (new, old) in w.host.drives.iter_mut().zip(self.host.drives) {
            new.blocks = old.blocks;
        }
        w
    }

    /// The header of the log that a crash now would leave.
    pub(crate) fn lost_header(&self) -> RegionHeader {
        header_of(&self.host.parts.crash(1))
    }

    /// A target with two drives and a blank log, whose lost log had the header `lost`.
    pub(crate) fn after_loss(lost: RegionHeader) -> Self {
        let parts = Parts::default();
        let header = parts.part(0..HEADER_BYTES);
        let region = LogRegion::create(header, LOG_LEN, [4; 16], BOOT, LogKind::Dax, crc).unwrap();
        let mine = parts.clone();
        let split = Box::new(move |range: Range<usize>| Ok(mine.part(range)));
        let (volumes, _) = Volumes::with_log(region, split, crc);
        Self::over(&[false; 2], identity(), parts, volumes.after_loss(lost))
    }

    /// Releases [`VOLUME`], or makes the target forget it. Returns the status.
    pub(crate) fn release(&mut self, admin: usize, forget: bool) -> u16 {
        let sqe = riopipe_bytes(&wire::release_command(VOLUME, forget)).cid(52);
        self.call(admin, sqe, &[]).status
    }

    /// A claim of [`VOLUME`] as it is, with this generation.
    pub(crate) fn next_claim(&self, generation: u32) -> Claim {
        Claim { create: false, generation, ..self.first_claim() }
    }

    /// A new owner with this generation: its admin connection and an I/O queue.
    pub(crate) fn successor(&mut self, generation: u32) -> (usize, usize) {
        let (admin, cntlid) = self.admin_as(RIVAL, RIVAL_ID, 0);
        let claim = self.next_claim(generation);
        assert_eq!(self.claim(admin, &claim).map(|c| c.status), Some(0));
        let io = self.io_as(RIVAL, RIVAL_ID, cntlid, 1);
        (admin, io)
    }

    /// A volatile drive, and a volume of two streams that have each written one block, 1 and 2; the
    /// owner is gone.
    pub(crate) fn abandoned_by_two() -> Self {
        let mut w = Self::new(&[true]);
        let Owner { admin, io, cntlid } = w.owner();
        let other = w.io(cntlid, 2);
        assert_eq!(w.bind(other, 1, 1, 0).status, 0);
        assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
        assert_eq!(w.call(other, ordered(1, &attribute(1, 2), 0), &block(2)).status, 0);
        w.hang_up(admin);
        w
    }

    /// An owner that died with unreleased groups: 1 and 2 flushed, 3 and 4 not, in stream 0.
    pub(crate) fn abandoned() -> Self {
        let mut w = Self::new(&[true]);
        let Owner { admin, io, .. } = w.owner();
        assert_eq!(w.call(io, ordered(1, &attribute(1, 1), 0), &block(1)).status, 0);
        let mut second = attribute(2, 2);
        second.flags = second.flags.with(Flags::FLUSH);
        second.tag = 77;
        assert_eq!(w.call(io, ordered(2, &second, 0), &block(2)).status, 0);
        assert_eq!(w.call(io, ordered(3, &attribute(3, 3), 0), &block(3)).status, 0);
        assert_eq!(w.call(io, ordered(4, &attribute(4, 4), 0), &block(4)).status, 0);
        w.hang_up(admin);
        w
    }
}

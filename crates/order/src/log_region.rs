//! A whole log region: header, directory of volumes, partitions (`docs/log-format.md`).
//!
//! The first [`HEADER_BYTES`] hold two copies of the header; every change writes both, one after
//! the other with a fence in between, so that neither a crash in the middle nor the loss of one
//! copy loses it. Partitions follow; [`VolumeRecord::partition`] gives their places. The owner of the
//! region splits it there: this module touches the header only.
//!
//! The region's bytes are input. A region that is not surely this one, of this version, whole and
//! valid, is refused with advice, never taken for "nothing to undo" (T19).

use alloc::vec::Vec;
use core::ops::Range;

use crate::attribute::{Member, StreamId, VolumeId};
use crate::ordering_log::{SLOTS_MAX, SLOTS_MIN, partition_bytes};
use crate::region::{Crc32c, Region, RegionError};
use codec::{Copy as HeaderCopy, decode, encode};
pub use error::{AddError, ChangeError, CreateError, OpenError};

mod codec;
mod error;
pub mod opening;
mod stamp;

/// Size of one copy of the header in bytes.
pub const HEADER_COPY_BYTES: usize = 4096;
/// Bytes at the start of the region that the header's two copies take.
pub const HEADER_BYTES: usize = 2 * HEADER_COPY_BYTES;
/// Partitions begin at, and are padded to, multiples of this many bytes.
pub const PARTITION_ALIGN: usize = 4096;
/// Most volumes in one region.
pub const VOLUMES_MAX: usize = 16;
/// Most members of one volume on one server.
pub const MEMBERS_MAX: usize = 16;
/// Version of the header's layout.
pub const VERSION: u32 = 1;

/// The kind of medium that the region is on. It decides which failures the region survives. The
/// same codes as on the wire (`docs/wire-format.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LogKind {
    /// A mapped file: survives the process, not a power cut. Its content is valid only within the
    /// boot that wrote it, or if it was written back when service ended (T19, T24).
    File = 1,
    /// Persistent memory.
    Dax = 2,
    /// A small drive with power-loss protection.
    Block = 3,
    /// A drive's persistent memory region.
    Pci = 4,
}

impl LogKind {
    /// Whether fenced bytes survive a power cut.
    #[must_use]
    pub const fn survives_power_cut(self) -> bool {
        !matches!(self, Self::File)
    }

    /// The name of the kind in the program and the library.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Dax => "dax",
            Self::Block => "block",
            Self::Pci => "pci",
        }
    }

    /// The kind with this code, in the region's header and on the wire; `None` for a code that is
    /// not known.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::File),
            2 => Some(Self::Dax),
            3 => Some(Self::Block),
            4 => Some(Self::Pci),
            _ => None,
        }
    }
}

/// Whether an initiator may still need a volume's log (T21).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VolumeState {
    /// Closed: nothing to recover, plain hosts may write.
    Closed = 1,
    /// Owned, or its owner vanished. Its log must be recovered before another initiator writes.
    Owned = 2,
}

impl VolumeState {
    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Closed),
            2 => Some(Self::Owned),
            _ => None,
        }
    }
}

/// A namespace of this server that is a member of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberNamespace {
    /// Its number in the volume.
    pub member: Member,
    /// The namespace.
    pub nsid: u32,
}

/// One volume in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// The volume.
    pub id: VolumeId,
    /// The number of the current ownership. Each new owner raises it before it reads any list (T8).
    pub generation: u32,
    /// Whether its log may be needed.
    pub state: VolumeState,
    /// Host identifier of the last owner, all zero if there was none.
    pub owner: [u8; 16],
    /// The generation of the owner that has last given up what was in the log (T26); 0 for none.
    /// Every group of a stream from before that is in doubt, until the stream is started again.
    pub given_up: u32,
    /// How long the target keeps the volume for that owner when it has lost its connection,
    /// milliseconds (T25).
    pub lease_ms: u32,
    /// The number of streams. Each has a partition of its own.
    pub streams: u16,
    /// Slots per partition.
    pub slots: u32,
    /// Where its first partition begins in the region, in bytes.
    pub offset: u64,
    /// Its members on this server, at most [`MEMBERS_MAX`].
    pub members: Vec<MemberNamespace>,
}

impl VolumeRecord {
    /// The bytes of a stream's partition, counted from the start of the region; `None` if the
    /// volume has no such stream.
    #[must_use]
    pub fn partition(&self, stream: StreamId) -> Option<Range<usize>> {
        let start = self.offset as usize + usize::from(stream.0) * stride(self.slots);
        (stream.0 < self.streams).then(|| start..start + partition_bytes(self.slots))
    }

    /// All bytes of the volume's partitions, padding included.
    #[must_use]
    pub fn extent(&self) -> Range<usize> {
        let start = self.offset as usize;
        start..start + usize::from(self.streams) * stride(self.slots)
    }
}

/// The content of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionHeader {
    /// How often the header was written.
    pub number: u64,
    /// The region's identity.
    pub uuid: [u8; 16],
    /// The boot in which the region was last opened for service.
    pub boot: [u8; 16],
    /// The target's incarnation. Every start raises it, so that no entry covers one of an earlier
    /// incarnation (T4).
    pub incarnation: u32,
    /// The medium.
    pub kind: LogKind,
    /// A clean stop has ended the service, and all of the region was written back before this flag:
    /// the region is whole in every later boot. Only for kinds whose fences do not survive a power
    /// cut.
    pub synced: bool,
    /// Size of the whole region in bytes.
    pub len: u64,
    /// The directory, in order of offset.
    pub volumes: Vec<VolumeRecord>,
}

/// The classes of content at the start of a region (T19).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// All zero: never used, or erased.
    Blank,
    /// A log region of this version, fit for service.
    Ours(RegionHeader),
    /// A `file:` log of another boot with volumes in it that was not written back when its service
    /// ended. Its pages may be of different moments, so nothing in it is valid, not even that a
    /// volume was closed (T24).
    StaleBoot(RegionHeader),
    /// A log region of a later version.
    Newer {
        /// Its version.
        version: u32,
    },
    /// Something else altogether.
    NotALog,
    /// A log region whose header copies are both unreadable, or contradict each other or the
    /// place they are in.
    Damaged {
        /// The damage.
        what: &'static str,
    },
}

/// Reads a region's header and returns its class. `header` covers at least the first
/// [`HEADER_BYTES`]; `len` is the whole region's size in bytes, `boot` the running system's boot.
#[must_use]
pub fn inspect<R: Region>(header: &R, len: usize, boot: [u8; 16], crc: Crc32c) -> Class {
    if header.len() < HEADER_BYTES {
        return Class::NotALog;
    }
    let mut bytes = [0; HEADER_COPY_BYTES];
    let mut copies = [0, HEADER_COPY_BYTES].map(|at| {
        header.read(at, &mut bytes);
        decode(&bytes, crc)
    });
    for copy in &copies {
        if let HeaderCopy::Newer { version } = *copy {
            return Class::Newer { version };
        }
    }
    copies.sort_by_key(|copy| match copy {
        HeaderCopy::Whole(header) => core::cmp::Reverse(header.number.saturating_add(1)),
        _ => core::cmp::Reverse(0),
    });
    match copies {
        [HeaderCopy::Whole(a), HeaderCopy::Whole(b)] if a.number == b.number && a != b => {
            Class::Damaged { what: "its two header copies contradict each other" }
        }
        [HeaderCopy::Whole(found), _] => {
            if found.len != len as u64 {
                Class::Damaged { what: "its size is not the one it was made with" }
            } else if found.is_valid(boot) {
                Class::Ours(found)
            } else {
                Class::StaleBoot(found)
            }
        }
        [HeaderCopy::Blank, HeaderCopy::Blank] => Class::Blank,
        [HeaderCopy::Foreign, HeaderCopy::Foreign | HeaderCopy::Blank]
        | [HeaderCopy::Blank, HeaderCopy::Foreign] => Class::NotALog,
        _ => Class::Damaged { what: "neither header copy is readable" },
    }
}

/// A log region in service.
#[derive(Debug)]
pub struct LogRegion<R> {
    region: R,
    header: RegionHeader,
    crc: Crc32c,
    /// The offset of the header copy that is known to hold `header`. The next change writes the other
    /// copy first.
    sure_copy: usize,
    /// Why nothing may be written any more: the region has failed, or its service has ended.
    failed: Option<RegionError>,
}

/// The request for a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// The volume.
    pub id: VolumeId,
    /// The number of streams.
    pub streams: u16,
    /// Slots per stream, [`SLOTS_MIN`] to [`SLOTS_MAX`].
    pub slots: u32,
    /// Its members on this server.
    pub members: Vec<MemberNamespace>,
}

impl<R: Region> LogRegion<R> {
    /// Makes a new, empty log region, durable before it returns. The old content of the header is
    /// lost: call [`inspect`] first.
    ///
    /// # Errors
    ///
    /// The region is too small, or failed.
    pub fn create(
        region: R,
        len: usize,
        uuid: [u8; 16],
        boot: [u8; 16],
        kind: LogKind,
        crc: Crc32c,
    ) -> Result<Self, CreateError> {
        let need = HEADER_BYTES + PARTITION_ALIGN;
        if len < need || region.len() < HEADER_BYTES {
            return Err(CreateError::TooSmall { have: len, need });
        }
        let header = RegionHeader {
            number: 0,
            uuid,
            boot,
            incarnation: 1,
            kind,
            synced: false,
            len: len as u64,
            volumes: Vec::new(),
        };
        let mut log = Self { region, header: header.clone(), crc, sure_copy: 0, failed: None };
        log.begin(header)?;
        Ok(log)
    }

    /// Opens an existing log region for service: begins a new incarnation and stamps the boot,
    /// durable before it returns.
    ///
    /// # Errors
    ///
    /// Every class of [`inspect`] but [`Class::Ours`] is refused with advice (T19).
    pub fn open(region: R, len: usize, boot: [u8; 16], crc: Crc32c) -> Result<Self, OpenError> {
        let header = match inspect(&region, len, boot, crc) {
            Class::Ours(header) => header,
            Class::StaleBoot(header) => {
                let volume = header.volumes.first().map_or_else(VolumeId::default, |v| v.id);
                return Err(OpenError::StaleBoot { volume });
            }
            Class::Blank => return Err(OpenError::Blank),
            Class::NotALog => return Err(OpenError::NotALog),
            Class::Newer { version } => return Err(OpenError::Newer { version }),
            Class::Damaged { what } => return Err(OpenError::Damaged { what }),
        };
        let Some(incarnation) = header.incarnation.checked_add(1) else {
            return Err(OpenError::Damaged { what: "its incarnations are used up" });
        };
        let sure_copy = sure_copy(&region, &header, crc);
        let mut log = Self { region, header: header.clone(), crc, sure_copy, failed: None };
        log.begin(RegionHeader { incarnation, boot, ..header })?;
        Ok(log)
    }

    /// The content of the header.
    #[must_use]
    pub const fn header(&self) -> &RegionHeader {
        &self.header
    }

    /// The target's incarnation, for every entry (T4).
    #[must_use]
    pub const fn incarnation(&self) -> u32 {
        self.header.incarnation
    }

    /// The record of a volume.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<&VolumeRecord> {
        self.header.volumes.iter().find(|record| record.id == id)
    }

    /// Adds a volume to the directory. `format` is called for every stream with the byte range of
    /// its partition and must format it; the volume becomes visible, durably, only afterwards.
    ///
    /// # Errors
    ///
    /// See [`AddError`]; the directory is unchanged.
    pub fn add_volume(
        &mut self,
        volume: NewVolume,
        mut format: impl FnMut(StreamId, Range<usize>) -> Result<(), RegionError>,
    ) -> Result<&VolumeRecord, AddError> {
        let record = self.place_volume(volume)?;
        for stream in (0..record.streams).map(StreamId) {
            let range = record.partition(stream).expect("the stream is below `streams`");
            format(stream, range)?;
        }
        let mut header = self.header.clone();
        let id = record.id;
        let at = header.volumes.partition_point(|v| v.offset < record.offset);
        header.volumes.insert(at, record);
        self.write_header(header)?;
        Ok(self.volume(id).expect("the volume was just added"))
    }

    /// Forgets a volume and frees its place. The change is durable before this returns. The caller
    /// must know that the log is not needed any more.
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn remove_volume(&mut self, id: VolumeId) -> Result<(), ChangeError> {
        let at = self.position(id)?;
        let mut header = self.header.clone();
        header.volumes.remove(at);
        Ok(self.write_header(header)?)
    }

    /// Gives a volume to a new owner, with a lease of `lease_ms` milliseconds. The change is
    /// durable before this returns. Only then may any list be read (T8).
    ///
    /// # Errors
    ///
    /// There is no such volume, its generation is not below the new one, or the region failed.
    pub fn set_generation(
        &mut self,
        id: VolumeId,
        generation: u32,
        owner: [u8; 16],
        lease_ms: u32,
    ) -> Result<(), ChangeError> {
        let at = self.position(id)?;
        let current = self.header.volumes[at].generation;
        if generation <= current {
            return Err(ChangeError::Generation { volume: id, given: generation, current });
        }
        let mut header = self.header.clone();
        header.volumes[at].generation = generation;
        header.volumes[at].owner = owner;
        header.volumes[at].lease_ms = lease_ms;
        header.volumes[at].state = VolumeState::Owned;
        Ok(self.write_header(header)?)
    }

    /// Records that a volume's owner has come back, and that its lease is `lease_ms` milliseconds
    /// from now on. The record is durable before this returns (T25).
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn renew(&mut self, id: VolumeId, lease_ms: u32) -> Result<(), ChangeError> {
        let at = self.position(id)?;
        let record = &self.header.volumes[at];
        if (record.state, record.lease_ms) == (VolumeState::Owned, lease_ms) {
            return Ok(());
        }
        let mut header = self.header.clone();
        header.volumes[at].lease_ms = lease_ms;
        header.volumes[at].state = VolumeState::Owned;
        Ok(self.write_header(header)?)
    }

    /// Records that the owner with this generation gives up the log of a volume. The record is
    /// durable before this returns. Only then may a recovery use it, or a partition be started
    /// again (T26).
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn give_up(&mut self, id: VolumeId, generation: u32) -> Result<(), ChangeError> {
        let at = self.position(id)?;
        let mut header = self.header.clone();
        header.volumes[at].given_up = generation;
        Ok(self.write_header(header)?)
    }

    /// Records whether a volume's log may still be needed. The record is durable before this
    /// returns.
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn set_state(&mut self, id: VolumeId, state: VolumeState) -> Result<(), ChangeError> {
        let at = self.position(id)?;
        if self.header.volumes[at].state == state {
            return Ok(());
        }
        let mut header = self.header.clone();
        header.volumes[at].state = state;
        Ok(self.write_header(header)?)
    }

    /// Returns the region itself.
    #[must_use]
    pub fn into_region(self) -> R {
        self.region
    }

    /// The index of a volume in the directory.
    fn position(&self, id: VolumeId) -> Result<usize, ChangeError> {
        let mut volumes = self.header.volumes.iter();
        let at = volumes.position(|record| record.id == id);
        at.ok_or(ChangeError::NoSuchVolume { volume: id })
    }

    /// The record of a new volume, in the first gap between the other volumes that is large enough
    /// for its partitions.
    fn place_volume(&self, volume: NewVolume) -> Result<VolumeRecord, AddError> {
        let NewVolume { id, streams, slots, members } = volume;
        let mut seen = [false; 256];
        let has_duplicate =
            members.iter().any(|m| core::mem::replace(&mut seen[usize::from(m.member.0)], true));
        if streams == 0
            || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots)
            || !(1..=MEMBERS_MAX).contains(&members.len())
            || has_duplicate
        {
            return Err(AddError::Shape { streams, slots, members: members.len() });
        }
        if self.volume(id).is_some() {
            return Err(AddError::AlreadyThere { volume: id });
        }
        if self.header.volumes.len() == VOLUMES_MAX {
            return Err(AddError::DirectoryFull);
        }
        let need = usize::from(streams)
            .checked_mul(stride(slots))
            .ok_or(AddError::TooSmall { need: usize::MAX, have: self.header.len as usize })?;
        let used = self.header.volumes.iter().map(VolumeRecord::extent);
        let end = self.header.len as usize;
        let ends = core::iter::once(HEADER_BYTES).chain(used.clone().map(|e| e.end));
        let starts = used.map(|e| e.start).chain(core::iter::once(end));
        let gaps = ends.zip(starts).map(|(from, to)| (from, to.saturating_sub(from)));
        let Some((offset, _)) = gaps.clone().find(|&(_, size)| size >= need) else {
            let have = gaps.map(|(_, size)| size).max().unwrap_or(0);
            return Err(AddError::TooSmall { need, have });
        };
        Ok(VolumeRecord {
            id,
            generation: 0,
            state: VolumeState::Closed,
            owner: [0; 16],
            given_up: 0,
            lease_ms: 0,
            streams,
            slots,
            offset: offset as u64,
            members,
        })
    }

    /// Writes both copies of the header: first the one that is older or unreadable, then the other. So
    /// one copy is whole at any time.
    fn write_header(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        self.write_both_copies(header, R::fence)
    }

    /// Writes both copies of the header, and makes each durable with `make_durable` before the next
    /// is written.
    fn write_both_copies(
        &mut self,
        header: RegionHeader,
        make_durable: impl Fn(&mut R) -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let header = RegionHeader { number: self.header.number + 1, ..header };
        let bytes = encode(&header, self.crc);
        for at in [HEADER_COPY_BYTES - self.sure_copy, self.sure_copy] {
            self.region.write(at, &bytes);
            make_durable(&mut self.region)
                .inspect_err(|error| self.failed = Some(error.clone()))?;
        }
        self.sure_copy = HEADER_COPY_BYTES - self.sure_copy;
        self.header = header;
        Ok(())
    }
}

/// The offset of a copy that has this content.
fn sure_copy<R: Region>(region: &R, header: &RegionHeader, crc: Crc32c) -> usize {
    let mut bytes = [0; HEADER_COPY_BYTES];
    region.read(0, &mut bytes);
    match decode(&bytes, crc) {
        HeaderCopy::Whole(first) if first == *header => 0,
        _ => HEADER_COPY_BYTES,
    }
}

/// Bytes from one partition to the next.
const fn stride(slots: u32) -> usize {
    partition_bytes(slots).next_multiple_of(PARTITION_ALIGN)
}

//! A whole log region: header, directory of volumes, partitions (`docs/log-format.md`).
//!
//! ```text
//!  0               4096            8192 = HEADER_BYTES
//! +---------------+---------------+-------------------+-------------------+-- - -
//! | header copy 0 | header copy 1 | volume A stream 0 | volume A stream 1 |
//! +---------------+---------------+-------------------+-------------------+-- - -
//! ```
//!
//! Every change of the header writes both copies, one after the other with a fence in between. So
//! neither a crash in the middle of a change nor the damage of one copy loses the header.
//!
//! This module reads and writes the header only. [`VolumeRecord::partition`] returns the place of
//! each partition, and the target opens a [`StreamLog`](crate::ordering_log::StreamLog) there.
//!
//! The region's bytes are input. A region that is damaged, of another version or no longer valid is
//! refused with advice. It is never read as a log with "nothing to undo", because then the undo of
//! a crash would be missing (trap T19).

use alloc::vec::Vec;
use core::ops::Range;

use crate::attribute::{StreamId, VolumeId};
use crate::ordering_log::{SLOTS_MAX, SLOTS_MIN};
use crate::region::{Crc32c, Region, RegionError};
use codec::{HeaderCopy, encode};
pub use error::{AddError, ChangeError, CreateError, OpenError};
use header::partition_stride;
pub use header::{LogKind, MemberNamespace, RegionHeader, VolumeRecord, VolumeState};
use inspect::read_header_copy;
pub use inspect::{Class, inspect};

mod codec;
mod error;
mod header;
mod inspect;
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

/// A log region in service.
#[derive(Debug)]
pub struct LogRegion<R> {
    region: R,
    header: RegionHeader,
    crc: Crc32c,
    /// The offset of a header copy that is known to hold `header`. The next change writes the other
    /// copy first, so that this copy stays whole.
    current_copy_offset: usize,
    /// The reason why nothing may be written any more: the region has failed, or its service has
    /// ended.
    write_refusal: Option<RegionError>,
}

/// The request for a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// The volume.
    pub id: VolumeId,
    /// The number of streams.
    pub streams: u16,
    /// The number of slots for each stream, [`SLOTS_MIN`] to [`SLOTS_MAX`].
    pub slots: u32,
    /// The members of the volume on this server.
    pub members: Vec<MemberNamespace>,
}

impl<R: Region> LogRegion<R> {
    /// Makes a new, empty log region, and makes it durable before it returns. The old content of
    /// the header is lost, so the caller calls [`inspect`] first. `len` is the size of the whole
    /// region in bytes.
    ///
    /// # Errors
    ///
    /// The region is too small, or it failed.
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
        let mut log = Self {
            region,
            header: header.clone(),
            crc,
            current_copy_offset: 0,
            write_refusal: None,
        };
        log.begin_incarnation(header)?;
        Ok(log)
    }

    /// Opens an existing log region for service: begins a new incarnation of the target, and
    /// records the boot. The change is durable before this returns.
    ///
    /// # Errors
    ///
    /// Every class of [`inspect`] but [`Class::Ours`] is refused with advice.
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
        let current_copy_offset = current_copy_offset(&region, &header, crc);
        let mut log =
            Self { region, header: header.clone(), crc, current_copy_offset, write_refusal: None };
        log.begin_incarnation(RegionHeader { incarnation, boot, ..header })?;
        Ok(log)
    }

    /// The content of the header.
    #[must_use]
    pub const fn header(&self) -> &RegionHeader {
        &self.header
    }

    /// The target's incarnation. Every entry that this incarnation appends records it.
    #[must_use]
    pub const fn incarnation(&self) -> u32 {
        self.header.incarnation
    }

    /// The record of a volume.
    #[must_use]
    pub fn volume(&self, id: VolumeId) -> Option<&VolumeRecord> {
        self.header.volumes.iter().find(|record| record.id == id)
    }

    /// Adds a volume to the directory.
    ///
    /// Calls `format` for every stream, with the byte range of its partition. `format` must format
    /// that partition. Only then is the volume recorded, durably. So a listed volume whose
    /// partition is blank has lost its log.
    ///
    /// # Errors
    ///
    /// See [`AddError`]. The directory is unchanged.
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
        let index = header.volumes.partition_point(|v| v.offset < record.offset);
        header.volumes.insert(index, record);
        self.write_header(header)?;
        Ok(self.volume(id).expect("the volume was just added"))
    }

    /// Removes a volume from the directory and frees its space. The change is durable before this
    /// returns. The caller must know that the log is not needed any more.
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn remove_volume(&mut self, id: VolumeId) -> Result<(), ChangeError> {
        let index = self.index_of(id)?;
        let mut header = self.header.clone();
        header.volumes.remove(index);
        Ok(self.write_header(header)?)
    }

    /// Gives a volume to a new owner, with a lease of `lease_ms` milliseconds. The change is
    /// durable before this returns. The caller may read the lists of the log only after that,
    /// because from then on the earlier owner can append nothing (trap T8).
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
        let index = self.index_of(id)?;
        let current = self.header.volumes[index].generation;
        if generation <= current {
            return Err(ChangeError::Generation { volume: id, given: generation, current });
        }
        let mut header = self.header.clone();
        let record = &mut header.volumes[index];
        record.generation = generation;
        record.owner = owner;
        record.lease_ms = lease_ms;
        record.state = VolumeState::Owned;
        Ok(self.write_header(header)?)
    }

    /// Records that a volume's owner has come back, and that its lease is `lease_ms` milliseconds
    /// from now on. The record is durable before this returns (trap T25).
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn renew(&mut self, id: VolumeId, lease_ms: u32) -> Result<(), ChangeError> {
        let index = self.index_of(id)?;
        let record = &self.header.volumes[index];
        if record.state == VolumeState::Owned && record.lease_ms == lease_ms {
            return Ok(());
        }
        let mut header = self.header.clone();
        let record = &mut header.volumes[index];
        record.lease_ms = lease_ms;
        record.state = VolumeState::Owned;
        Ok(self.write_header(header)?)
    }

    /// Records that the owner with this generation gives up the log of a volume. The record is
    /// durable before this returns. The caller recovers without the log, or starts a partition
    /// again, only after that. Otherwise a
    /// recovery after a crash would undo groups by a log that was given up (trap T26).
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn give_up(&mut self, id: VolumeId, generation: u32) -> Result<(), ChangeError> {
        let index = self.index_of(id)?;
        let mut header = self.header.clone();
        header.volumes[index].given_up_generation = generation;
        Ok(self.write_header(header)?)
    }

    /// Records whether a volume's log may still be needed. The record is durable before this
    /// returns.
    ///
    /// # Errors
    ///
    /// There is no such volume, or the region failed.
    pub fn set_state(&mut self, id: VolumeId, state: VolumeState) -> Result<(), ChangeError> {
        let index = self.index_of(id)?;
        if self.header.volumes[index].state == state {
            return Ok(());
        }
        let mut header = self.header.clone();
        header.volumes[index].state = state;
        Ok(self.write_header(header)?)
    }

    /// Returns the region itself.
    #[must_use]
    pub fn into_region(self) -> R {
        self.region
    }

    /// The index of a volume in the directory.
    fn index_of(&self, id: VolumeId) -> Result<usize, ChangeError> {
        let mut volumes = self.header.volumes.iter();
        let index = volumes.position(|record| record.id == id);
        index.ok_or(ChangeError::NoSuchVolume { volume: id })
    }

    /// The record of a new volume, in the first gap between the other volumes that is large enough
    /// for its partitions.
    fn place_volume(&self, volume: NewVolume) -> Result<VolumeRecord, AddError> {
        check_shape(&volume)?;
        let NewVolume { id, streams, slots, members } = volume;
        if self.volume(id).is_some() {
            return Err(AddError::AlreadyThere { volume: id });
        }
        if self.header.volumes.len() == VOLUMES_MAX {
            return Err(AddError::DirectoryFull);
        }
        let need = usize::from(streams)
            .checked_mul(partition_stride(slots))
            .ok_or(AddError::TooSmall { need: usize::MAX, have: self.header.len as usize })?;
        let offset = self.find_gap(need)?;
        Ok(VolumeRecord {
            id,
            generation: 0,
            state: VolumeState::Closed,
            owner: [0; 16],
            given_up_generation: 0,
            lease_ms: 0,
            streams,
            slots,
            offset: offset as u64,
            members,
        })
    }

    /// The offset of the first gap of at least `need` bytes between the header, the volumes and the
    /// end of the region.
    fn find_gap(&self, need: usize) -> Result<usize, AddError> {
        let mut largest_gap = 0;
        let mut gap_start = HEADER_BYTES;
        // The directory is in order of offset, so each gap ends where the next volume begins.
        let volumes = self.header.volumes.iter().map(VolumeRecord::extent);
        let region_end = self.header.len as usize;
        for used in volumes.chain(core::iter::once(region_end..region_end)) {
            let gap = used.start.saturating_sub(gap_start);
            if gap >= need {
                return Ok(gap_start);
            }
            largest_gap = largest_gap.max(gap);
            gap_start = used.end;
        }
        Err(AddError::TooSmall { need, have: largest_gap })
    }

    /// Writes both copies of the header, and fences after each: first the copy that is older or
    /// unreadable, then the other one. So one copy is whole at any time.
    fn write_header(&mut self, header: RegionHeader) -> Result<(), RegionError> {
        self.write_both_copies(header, R::fence)
    }

    /// Writes both copies of the header, and makes the first durable with `make_durable` before it
    /// writes the second.
    fn write_both_copies(
        &mut self,
        header: RegionHeader,
        make_durable: impl Fn(&mut R) -> Result<(), RegionError>,
    ) -> Result<(), RegionError> {
        if let Some(error) = &self.write_refusal {
            return Err(error.clone());
        }
        let header = RegionHeader { number: self.header.number + 1, ..header };
        let bytes = encode(&header, self.crc);
        let other_copy_offset = HEADER_COPY_BYTES - self.current_copy_offset;
        for offset in [other_copy_offset, self.current_copy_offset] {
            self.region.write(offset, &bytes);
            make_durable(&mut self.region)
                .inspect_err(|error| self.write_refusal = Some(error.clone()))?;
        }
        self.current_copy_offset = other_copy_offset;
        self.header = header;
        Ok(())
    }
}

/// Checks the counts of a new volume, and that no member is listed twice.
fn check_shape(volume: &NewVolume) -> Result<(), AddError> {
    let NewVolume { streams, slots, ref members, .. } = *volume;
    let mut is_listed = [false; 1 + u8::MAX as usize];
    let mut has_duplicate = false;
    for namespace in members {
        let seen_before = &mut is_listed[usize::from(namespace.member.0)];
        has_duplicate |= *seen_before;
        *seen_before = true;
    }
    if streams == 0
        || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots)
        || !(1..=MEMBERS_MAX).contains(&members.len())
        || has_duplicate
    {
        return Err(AddError::Shape { streams, slots, members: members.len() });
    }
    Ok(())
}

/// The offset of a header copy that has this content.
fn current_copy_offset<R: Region>(region: &R, header: &RegionHeader, crc: Crc32c) -> usize {
    match read_header_copy(region, 0, crc) {
        HeaderCopy::Whole(first) if first == *header => 0,
        _ => HEADER_COPY_BYTES,
    }
}

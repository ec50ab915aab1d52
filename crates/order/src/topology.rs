//! The drives of a volume, and the drive and block at which each block of the volume lies.
//!
//! The engines use it to split a write: they cut the write where the next stripe unit lies on
//! another drive, and where the transfer limit of a drive ends (Rio paper §4.5, "request
//! splitting").

use alloc::vec::Vec;

use crate::attribute::{Member, StreamId};

/// One drive of a volume, and the part of it that the volume uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// The index of the server (target) that has the drive.
    pub server: u16,
    /// The first block of the data area. The label lies before it.
    pub start: u64,
    /// The size of the data area in blocks.
    pub blocks: u64,
    /// The most blocks of one request (MDTS).
    pub request_blocks_max: u32,
    /// Whether the drive has a volatile write cache. On such a drive only a FLUSH makes a completed
    /// write durable.
    pub volatile: bool,
}

/// One target server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// The number of slots of one stream's ordering log on the server; 0 if it has no log.
    pub slots: u32,
}

/// The drives and servers of a volume, and how its blocks are striped over them.
///
/// The stripe units of the volume go to the members in turns. With three members:
///
/// ```text
///              member 0   member 1   member 2
///   stripe 0    unit 0     unit 1     unit 2
///   stripe 1    unit 3     unit 4     unit 5
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    members: Vec<MemberInfo>,
    servers: Vec<ServerInfo>,
    /// The size of a stripe unit in blocks.
    unit_blocks: u32,
    /// The number of stripes: as many as whole units fit on the smallest member.
    stripes: u64,
    /// The size of the prepare area of each member in blocks; 0 if the volume has none.
    prepare_blocks: u32,
    /// The number of streams that have a part of it.
    prepare_parts: u16,
}

/// The part of the prepare area that belongs to a stream. It is the same on each member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreparePart {
    /// The first block, counted from the start of the area.
    pub first: u32,
    /// The number of blocks; 0: updates in place are not redirected.
    pub blocks: u32,
}

/// A part of a write that lies on one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The member.
    pub member: Member,
    /// The first block on the member's drive.
    pub lba: u64,
    /// The number of blocks.
    pub blocks: u32,
    /// The number of blocks of the write that lie before this part.
    pub offset: u32,
}

impl Extent {
    /// No blocks.
    pub(crate) const EMPTY: Self = Self { member: Member(0), lba: 0, blocks: 0, offset: 0 };

    /// Whether the two have a block of a drive in common.
    #[must_use]
    pub fn touches(&self, other: &Self) -> bool {
        self.member == other.member
            && self.lba < other.lba + u64::from(other.blocks)
            && other.lba < self.lba + u64::from(self.blocks)
    }
}

/// The place of a volume block on its member.
struct BlockPlace {
    /// The index of the member.
    member_index: u64,
    /// The block, counted from the start of the member's data area.
    member_block: u64,
    /// The number of blocks from there to the end of the stripe unit.
    left_in_unit: u64,
}

/// Why members do not make up a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// No members, or more than 256.
    #[error("a volume has 1 to 256 members, not {0}")]
    Members(usize),
    /// A member names a server that does not exist.
    #[error("member {member} names server {server}, which is not there")]
    Server {
        /// The member.
        member: usize,
        /// The server that the member names.
        server: u16,
    },
    /// A member has no space for a single stripe unit.
    #[error(
        "member {member} has {blocks} blocks of data area, less than one stripe unit of {unit}"
    )]
    TooSmall {
        /// The member.
        member: usize,
        /// The size of its data area in blocks.
        blocks: u64,
        /// The stripe unit in blocks.
        unit: u32,
    },
    /// The stripe unit or a transfer limit is 0 blocks.
    #[error("a stripe unit or transfer limit of 0 blocks")]
    Zero,
}

impl Topology {
    /// Stripes a volume over `members` in units of `unit_blocks` blocks. The volume uses as many
    /// units of each member as the smallest member has.
    ///
    /// # Errors
    /// The members do not make up a volume.
    pub fn new(
        members: Vec<MemberInfo>,
        servers: Vec<ServerInfo>,
        unit_blocks: u32,
    ) -> Result<Self, TopologyError> {
        if members.is_empty() || members.len() > 256 {
            return Err(TopologyError::Members(members.len()));
        }
        if unit_blocks == 0 || members.iter().any(|m| m.request_blocks_max == 0) {
            return Err(TopologyError::Zero);
        }
        let mut stripes = u64::MAX;
        for (index, member) in members.iter().enumerate() {
            if usize::from(member.server) >= servers.len() {
                return Err(TopologyError::Server { member: index, server: member.server });
            }
            if member.blocks < u64::from(unit_blocks) {
                return Err(TopologyError::TooSmall {
                    member: index,
                    blocks: member.blocks,
                    unit: unit_blocks,
                });
            }
            stripes = stripes.min(member.blocks / u64::from(unit_blocks));
        }
        Ok(Self { members, servers, unit_blocks, stripes, prepare_blocks: 0, prepare_parts: 0 })
    }

    /// The same volume with a prepare area of `blocks` blocks on each member, right before the data
    /// area. Engine `horae` writes updates in place there first. Each of the `streams` streams has a
    /// part of its own.
    #[must_use]
    pub fn with_prepare_area(self, blocks: u32, streams: u16) -> Self {
        debug_assert!(self.members.iter().all(|member| member.start > u64::from(blocks)));
        Self { prepare_blocks: blocks, prepare_parts: streams, ..self }
    }

    /// The part of a stream in the prepare area of each member.
    #[must_use]
    pub fn prepare_part(&self, stream: StreamId) -> PreparePart {
        if stream.0 >= self.prepare_parts {
            return PreparePart::default();
        }
        let blocks = self.prepare_blocks / u32::from(self.prepare_parts);
        PreparePart { first: u32::from(stream.0) * blocks, blocks }
    }

    /// The size of the prepare area of each member in blocks; 0 if the volume has none.
    #[must_use]
    pub const fn prepare_blocks(&self) -> u32 {
        self.prepare_blocks
    }

    /// The first block of a member's prepare area on its drive.
    #[must_use]
    pub fn prepare_start(&self, member: Member) -> u64 {
        self.member(member).start - u64::from(self.prepare_blocks)
    }

    /// The size of the volume in blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.stripes * u64::from(self.unit_blocks) * self.members.len() as u64
    }

    /// The members, in volume order.
    #[must_use]
    pub fn members(&self) -> &[MemberInfo] {
        &self.members
    }

    /// One member.
    #[must_use]
    pub fn member(&self, member: Member) -> &MemberInfo {
        &self.members[usize::from(member.0)]
    }

    /// The servers.
    #[must_use]
    pub fn servers(&self) -> &[ServerInfo] {
        &self.servers
    }

    /// The size of a stripe unit in blocks.
    #[must_use]
    pub fn unit_blocks(&self) -> u32 {
        self.unit_blocks
    }

    /// The number of volatile drives of a server. One group has at most so many flush entries for
    /// the server.
    #[must_use]
    pub fn volatile_count_on(&self, server: u16) -> u32 {
        self.members.iter().filter(|m| m.server == server && m.volatile).count() as u32
    }

    /// An upper bound of the number of requests into which a write of `blocks` blocks is split.
    #[must_use]
    pub fn request_count_max(&self, blocks: u32) -> u64 {
        // On one member, adjacent units are adjacent on the drive. So the whole drive counts as one
        // unit.
        let unit_blocks = if self.members.len() == 1 { u32::MAX } else { self.unit_blocks };
        // A write that begins in the middle of a unit touches one unit more. It is counted for
        // every write, because this is only an upper bound. Each touched unit has at least one
        // block of the write.
        let units = u64::from(blocks).div_ceil(u64::from(unit_blocks)) + 1;
        let touched_units = units.min(u64::from(blocks));
        // The smallest transfer limit of a drive cuts the blocks of each touched unit.
        let limits = self.members.iter().map(|member| member.request_blocks_max);
        let smallest_limit = limits.min().unwrap_or(1);
        let blocks_in_unit = unit_blocks.min(blocks);
        let requests_per_unit = u64::from(blocks_in_unit.div_ceil(smallest_limit)).max(1);
        touched_units * requests_per_unit
    }

    /// Whether any drive has a volatile write cache.
    #[must_use]
    pub fn has_volatile_member(&self) -> bool {
        self.members.iter().any(|m| m.volatile)
    }

    /// The extent of `blocks` blocks at volume block `lba`, if these blocks need no split;
    /// otherwise `None`. [`for_each_extent`](Self::for_each_extent) splits them.
    #[inline]
    #[must_use]
    pub fn single_extent(&self, lba: u64, blocks: u32) -> Option<Extent> {
        let [info] = &self.members[..] else { return self.single_extent_of_many(lba, blocks) };
        (blocks > 0 && blocks <= info.request_blocks_max).then(|| Extent {
            member: Member(0),
            lba: info.start + lba,
            blocks,
            offset: 0,
        })
    }

    /// [`single_extent`](Self::single_extent) on a volume of several members: the blocks must lie
    /// within one stripe unit.
    fn single_extent_of_many(&self, lba: u64, blocks: u32) -> Option<Extent> {
        let place = self.place_of(lba);
        let info = &self.members[place.member_index as usize];
        let fits = u64::from(blocks) <= place.left_in_unit && blocks <= info.request_blocks_max;
        (blocks > 0 && fits).then(|| Extent {
            member: Member(place.member_index as u8),
            lba: info.start + place.member_block,
            blocks,
            offset: 0,
        })
    }

    /// Splits `blocks` blocks at volume block `lba` into extents, and calls `visit` for each of
    /// them in order. The caller has checked that the blocks lie within the volume.
    pub fn for_each_extent(&self, lba: u64, blocks: u32, mut visit: impl FnMut(Extent)) {
        debug_assert!(lba + u64::from(blocks) <= self.blocks());
        let mut offset = 0;
        while offset < blocks {
            let place = self.place_of(lba + u64::from(offset));
            let info = &self.members[place.member_index as usize];
            let len = place
                .left_in_unit
                .min(u64::from(blocks - offset))
                .min(u64::from(info.request_blocks_max)) as u32;
            visit(Extent {
                member: Member(place.member_index as u8),
                lba: info.start + place.member_block,
                blocks: len,
                offset,
            });
            offset += len;
        }
    }

    /// The member on which a volume block lies, and the block there.
    #[inline]
    fn place_of(&self, volume_block: u64) -> BlockPlace {
        let member_count = self.members.len() as u64;
        if member_count == 1 {
            // On one member, adjacent units are adjacent on the drive: no unit ends.
            return BlockPlace {
                member_index: 0,
                member_block: volume_block,
                left_in_unit: u64::MAX,
            };
        }
        let unit_blocks = u64::from(self.unit_blocks);
        let (unit_number, block_in_unit) = (volume_block / unit_blocks, volume_block % unit_blocks);
        // Units go to the members in turns: unit 0 to member 0, unit 1 to member 1, and so on.
        let (stripe, member_index) = (unit_number / member_count, unit_number % member_count);
        BlockPlace {
            member_index,
            member_block: stripe * unit_blocks + block_in_unit,
            left_in_unit: unit_blocks - block_in_unit,
        }
    }

    /// The volume block that lies at block `lba` of a member's drive. `None` for a member that does
    /// not exist, for a block of the label, and for a block that no stripe covers because the
    /// member is larger than the smallest one.
    #[must_use]
    pub fn volume_block(&self, member: Member, lba: u64) -> Option<u64> {
        let info = self.members.get(usize::from(member.0))?;
        let unit_blocks = u64::from(self.unit_blocks);
        let member_block = lba.checked_sub(info.start)?;
        let (stripe, block_in_unit) = (member_block / unit_blocks, member_block % unit_blocks);
        if stripe >= self.stripes {
            return None;
        }
        let unit_number = stripe * self.members.len() as u64 + u64::from(member.0);
        Some(unit_number * unit_blocks + block_in_unit)
    }

    /// Whether `blocks` blocks at `lba` of a member's drive lie within one stripe unit. Always true
    /// on a volume of one member. A merged request must not cross a unit (trap T16).
    #[must_use]
    pub fn is_within_unit(&self, member: Member, lba: u64, blocks: u32) -> bool {
        let unit_blocks = u64::from(self.unit_blocks);
        let first = lba - self.member(member).start;
        let last = first + u64::from(blocks) - 1;
        self.members.len() == 1 || first / unit_blocks == last / unit_blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn member(server: u16, max: u32) -> MemberInfo {
        MemberInfo { server, start: 8, blocks: 67, request_blocks_max: max, volatile: true }
    }

    #[test]
    fn stripes_cover_each_block_once() {
        let members = vec![member(0, 3), member(1, 32), member(1, 32)];
        let t = Topology::new(members, vec![ServerInfo { slots: 8 }; 2], 4).unwrap();
        assert_eq!(t.blocks(), 16 * 4 * 3);
        let mut seen = alloc::collections::BTreeSet::new();
        let mut next = 0;
        t.for_each_extent(0, 192, |e| {
            assert_eq!(e.offset, next);
            next += e.blocks;
            assert!(e.blocks <= t.member(e.member).request_blocks_max);
            assert!(t.is_within_unit(e.member, e.lba, e.blocks));
            for b in 0..u64::from(e.blocks) {
                assert!(e.lba + b >= 8 && e.lba + b < 8 + 64);
                assert!(seen.insert((e.member, e.lba + b)));
            }
        });
        assert_eq!((next, seen.len()), (192, 192));
    }

    #[test]
    fn each_block_of_a_drive_leads_back_to_the_volume() {
        for width in 1..=3 {
            let mut members = vec![member(0, 3); width];
            // Larger than the smallest: its excess is not used.
            members[width - 1].blocks += 40;
            members[0].start = 5;
            members[0].blocks = 67;
            let t = Topology::new(members, vec![ServerInfo { slots: 8 }], 4).unwrap();
            for block in 0..t.blocks() {
                let mut place = None;
                t.for_each_extent(block, 1, |e| place = Some((e.member, e.lba)));
                let (member, lba) = place.unwrap();
                assert_eq!(t.volume_block(member, lba), Some(block));
                assert_eq!(t.is_within_unit(member, lba, 2), width == 1 || block % 4 != 3);
            }
            let known =
                |i: usize| (0..200).filter_map(|b| t.volume_block(Member(i as u8), b)).count();
            let total: usize = (0..width).map(known).sum();
            assert_eq!(total as u64, t.blocks(), "no other block of a drive is the volume's");
            assert_eq!(t.volume_block(Member(0), 4), None, "a label");
            assert_eq!(t.volume_block(Member(0), 5), Some(0));
            assert_eq!(t.volume_block(Member(0), 5 + 64), None, "what no stripe covers");
            assert_eq!(t.volume_block(Member(width as u8), 8), None, "no such member");
        }
    }

    #[test]
    fn one_member_is_cut_only_by_its_limit() {
        let t = Topology::new(vec![member(0, 32)], vec![ServerInfo { slots: 8 }], 4).unwrap();
        let mut parts = vec![];
        t.for_each_extent(3, 40, |e| parts.push((e.lba, e.blocks)));
        assert_eq!(parts, [(11, 32), (43, 8)]);
    }

    #[test]
    fn no_write_makes_more_parts_than_foreseen() {
        for (width, max) in [(1, 3), (1, 32), (3, 1), (3, 3), (3, 32)] {
            let t = Topology::new(vec![member(0, max); width], vec![ServerInfo { slots: 8 }], 4)
                .unwrap();
            for blocks in 1..=40 {
                let parts = |lba| {
                    let mut parts = 0;
                    t.for_each_extent(lba, blocks, |_| parts += 1);
                    parts
                };
                let most = (0..8).map(parts).max().unwrap();
                assert!(
                    t.request_count_max(blocks) >= most,
                    "{width} of {max}: {blocks} blocks, {most}"
                );
            }
            assert_eq!(t.request_count_max(1), 1, "a block is never cut");
        }
    }

    #[test]
    fn single_extent_finds_what_lies_in_one_piece_and_nothing_else() {
        for (width, max) in [(1, 3), (1, 32), (2, 3), (3, 32)] {
            let t = Topology::new(vec![member(0, max); width], vec![ServerInfo { slots: 8 }], 4)
                .unwrap();
            for (lba, blocks) in (0..24).flat_map(|lba| (0..=36).map(move |blocks| (lba, blocks))) {
                let mut parts = vec![];
                t.for_each_extent(lba, blocks, |extent| parts.push(extent));
                let one = if let [part] = parts[..] { Some(part) } else { None };
                assert_eq!(
                    t.single_extent(lba, blocks),
                    one,
                    "{width} of {max}: {blocks} at {lba}"
                );
            }
        }
    }

    #[test]
    fn volatile_drives_are_counted_where_they_are() {
        let kept = MemberInfo { volatile: false, ..member(1, 8) };
        let of = |members| Topology::new(members, vec![ServerInfo { slots: 8 }; 2], 4).unwrap();
        let t = of(vec![member(0, 8), kept, member(0, 8)]);
        assert_eq!((t.volatile_count_on(0), t.volatile_count_on(1), t.unit_blocks()), (2, 0, 4));
        assert!(t.has_volatile_member());
        assert!(!of(vec![kept; 2]).has_volatile_member());
    }

    #[test]
    fn senseless_volumes_are_refused() {
        let servers = vec![ServerInfo { slots: 8 }];
        assert!(matches!(
            Topology::new(vec![], servers.clone(), 4),
            Err(TopologyError::Members(0))
        ));
        assert!(matches!(
            Topology::new(vec![member(1, 8)], servers.clone(), 4),
            Err(TopologyError::Server { member: 0, server: 1 })
        ));
        assert!(matches!(
            Topology::new(vec![member(0, 8)], servers.clone(), 128),
            Err(TopologyError::TooSmall { .. })
        ));
        assert!(matches!(Topology::new(vec![member(0, 8)], servers, 0), Err(TopologyError::Zero)));
    }
}

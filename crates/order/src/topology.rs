//! The places of a volume's blocks: members, servers and the stripe map.
//!
//! Splitting follows from it: a write is cut where the stripe changes member and where a drive's
//! transfer limit ends (Rio paper §4.5, "request splitting").

use alloc::vec::Vec;

use crate::attribute::Member;

/// One drive of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Which server (target) has it.
    pub server: u16,
    /// First block of its data area. Labels lie before it.
    pub start: u64,
    /// Blocks of its data area.
    pub blocks: u64,
    /// Most blocks of one request (MDTS).
    pub request_blocks_max: u32,
    /// Whether it has a volatile write cache. Then a completed write is not durable, only a flushed
    /// one is.
    pub volatile: bool,
}

/// One target server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Slots of a stream's ordering log on it; 0 if it has no log.
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
    /// Blocks of a stripe unit.
    unit_blocks: u32,
    /// How many stripes the volume has: as many as whole units fit on the smallest member.
    stripes: u64,
}

/// A part of a write that lies on one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The member.
    pub member: Member,
    /// First block on the member's drive.
    pub lba: u64,
    /// Blocks.
    pub blocks: u32,
    /// Where the part starts in the write, blocks.
    pub offset: u32,
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
        /// The server it names.
        server: u16,
    },
    /// A member has no space for a single stripe unit.
    #[error(
        "member {member} has {blocks} blocks of data area, less than one stripe unit of {unit}"
    )]
    TooSmall {
        /// The member.
        member: usize,
        /// The size of its data area, blocks.
        blocks: u64,
        /// The stripe unit, blocks.
        unit: u32,
    },
    /// The stripe unit or a transfer limit is 0 blocks.
    #[error("a stripe unit or transfer limit of 0 blocks")]
    Zero,
}

impl Topology {
    /// Stripes a volume over `members` in units of `unit_blocks`. Each member gives as many whole
    /// units as the smallest has.
    ///
    /// # Errors
    /// When the members do not make up a volume.
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
        for (i, member) in members.iter().enumerate() {
            if usize::from(member.server) >= servers.len() {
                return Err(TopologyError::Server { member: i, server: member.server });
            }
            if member.blocks < u64::from(unit_blocks) {
                return Err(TopologyError::TooSmall {
                    member: i,
                    blocks: member.blocks,
                    unit: unit_blocks,
                });
            }
            stripes = stripes.min(member.blocks / u64::from(unit_blocks));
        }
        Ok(Self { members, servers, unit_blocks, stripes })
    }

    /// Blocks of the volume.
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

    /// Blocks of a stripe unit.
    #[must_use]
    pub fn unit_blocks(&self) -> u32 {
        self.unit_blocks
    }

    /// How many volatile drives a server has: the most flush entries that one group puts there.
    #[must_use]
    pub fn volatile_on(&self, server: u16) -> u32 {
        self.members.iter().filter(|m| m.server == server && m.volatile).count() as u32
    }

    /// Most requests that a write of so many blocks becomes.
    #[must_use]
    pub fn parts_max(&self, blocks: u32) -> u64 {
        let smallest = self.members.iter().map(|m| m.request_blocks_max).min().unwrap_or(1);
        let unit = if self.members.len() == 1 { u32::MAX } else { self.unit_blocks };
        // Each unit it touches is cut by the transfer limit on its own.
        let units = u64::from(blocks).div_ceil(u64::from(unit)) + 1;
        units.min(u64::from(blocks)) * u64::from(unit.min(blocks).div_ceil(smallest)).max(1)
    }

    /// Whether any drive has a volatile cache.
    #[must_use]
    pub fn any_volatile(&self) -> bool {
        self.members.iter().any(|m| m.volatile)
    }

    /// The extent of `blocks` at volume block `lba`, if it is a single one; `None` where only
    /// [`map`](Self::map) can find it.
    #[inline]
    #[must_use]
    pub fn single(&self, lba: u64, blocks: u32) -> Option<Extent> {
        let [info] = &self.members[..] else { return self.single_of_many(lba, blocks) };
        (blocks > 0 && blocks <= info.request_blocks_max).then(|| Extent {
            member: Member(0),
            lba: info.start + lba,
            blocks,
            offset: 0,
        })
    }

    /// [`single`](Self::single) on a volume of several members: within one stripe unit.
    fn single_of_many(&self, lba: u64, blocks: u32) -> Option<Extent> {
        let (unit, width) = (u64::from(self.unit_blocks), self.members.len() as u64);
        // Units go to the members in turns: unit 0 to member 0, unit 1 to member 1, and so on.
        let (unit_number, within) = (lba / unit, lba % unit);
        let (stripe, index) = (unit_number / width, unit_number % width);
        let info = &self.members[index as usize];
        let fits = within + u64::from(blocks) <= unit && blocks <= info.request_blocks_max;
        (blocks > 0 && fits).then(|| Extent {
            member: Member(index as u8),
            lba: info.start + stripe * unit + within,
            blocks,
            offset: 0,
        })
    }

    /// Cuts `blocks` at volume block `lba` into the extents it lies on. The caller has checked
    /// that it lies within the volume.
    pub fn map(&self, lba: u64, blocks: u32, mut each: impl FnMut(Extent)) {
        debug_assert!(lba + u64::from(blocks) <= self.blocks());
        let unit = u64::from(self.unit_blocks);
        let width = self.members.len() as u64;
        let mut offset = 0;
        while offset < blocks {
            let at = lba + u64::from(offset);
            // On one member, units are adjacent on the drive and need not be cut apart.
            let (index, on_member, left) = if width == 1 {
                (0, at, u64::from(blocks - offset))
            } else {
                let (unit_number, within) = (at / unit, at % unit);
                let (stripe, index) = (unit_number / width, unit_number % width);
                (index, stripe * unit + within, unit - within)
            };
            let info = &self.members[index as usize];
            let len = left.min(u64::from(blocks - offset)).min(u64::from(info.request_blocks_max));
            each(Extent {
                member: Member(index as u8),
                lba: info.start + on_member,
                blocks: len as u32,
                offset,
            });
            offset += len as u32;
        }
    }

    /// The volume block of block `lba` on a member's drive: the inverse of [`map`](Self::map).
    /// `None` for a member that does not exist, and outside of its data area: for labels, and for
    /// the excess of a larger member over the smallest.
    #[must_use]
    pub fn volume_block(&self, member: Member, lba: u64) -> Option<u64> {
        let info = self.members.get(usize::from(member.0))?;
        let unit = u64::from(self.unit_blocks);
        let at = lba.checked_sub(info.start)?;
        let (stripe, within) = (at / unit, at % unit);
        let width = self.members.len() as u64;
        (stripe < self.stripes).then(|| (stripe * width + u64::from(member.0)) * unit + within)
    }

    /// Whether `blocks` at `lba` of a member's drive lie within one stripe unit (T16). Always true
    /// on a volume of one member.
    #[must_use]
    pub fn within_unit(&self, member: Member, lba: u64, blocks: u32) -> bool {
        let unit = u64::from(self.unit_blocks);
        let start = lba - self.member(member).start;
        self.members.len() == 1 || start / unit == (start + u64::from(blocks) - 1) / unit
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
        t.map(0, 192, |e| {
            assert_eq!(e.offset, next);
            next += e.blocks;
            assert!(e.blocks <= t.member(e.member).request_blocks_max);
            assert!(t.within_unit(e.member, e.lba, e.blocks));
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
                t.map(block, 1, |e| place = Some((e.member, e.lba)));
                let (member, lba) = place.unwrap();
                assert_eq!(t.volume_block(member, lba), Some(block));
                assert_eq!(t.within_unit(member, lba, 2), width == 1 || block % 4 != 3);
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
        t.map(3, 40, |e| parts.push((e.lba, e.blocks)));
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
                    t.map(lba, blocks, |_| parts += 1);
                    parts
                };
                let most = (0..8).map(parts).max().unwrap();
                assert!(t.parts_max(blocks) >= most, "{width} of {max}: {blocks} blocks, {most}");
            }
            assert_eq!(t.parts_max(1), 1, "a block is never cut");
        }
    }

    #[test]
    fn single_finds_what_lies_in_one_piece_and_nothing_else() {
        for (width, max) in [(1, 3), (1, 32), (2, 3), (3, 32)] {
            let t = Topology::new(vec![member(0, max); width], vec![ServerInfo { slots: 8 }], 4)
                .unwrap();
            for (lba, blocks) in (0..24).flat_map(|lba| (0..=36).map(move |blocks| (lba, blocks))) {
                let mut parts = vec![];
                t.map(lba, blocks, |extent| parts.push(extent));
                let one = if let [part] = parts[..] { Some(part) } else { None };
                assert_eq!(t.single(lba, blocks), one, "{width} of {max}: {blocks} at {lba}");
            }
        }
    }

    #[test]
    fn volatile_drives_are_counted_where_they_are() {
        let kept = MemberInfo { volatile: false, ..member(1, 8) };
        let of = |members| Topology::new(members, vec![ServerInfo { slots: 8 }; 2], 4).unwrap();
        let t = of(vec![member(0, 8), kept, member(0, 8)]);
        assert_eq!((t.volatile_on(0), t.volatile_on(1), t.unit_blocks()), (2, 0, 4));
        assert!(t.any_volatile());
        assert!(!of(vec![kept; 2]).any_volatile());
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

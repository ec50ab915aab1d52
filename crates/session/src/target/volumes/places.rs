//! The namespaces at which the members of volumes are now (trap T27).

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::region::Region;

use super::Volumes;

impl<R: Region> Volumes<R> {
    /// Notes where the members of volumes are now, by the labels of the drives. The log's directory
    /// has the namespace ids at which the members were when the volume was made there (trap T27).
    ///
    /// A member that no label names stays where it was, unless another member is there now.
    pub fn locate_members(&mut self, found: &[(VolumeId, MemberNamespace)]) {
        for volume in &mut self.list {
            let id = volume.id;
            let is_at_its_place = |place: &MemberNamespace| found.contains(&(id, *place));
            volume.members.retain_mut(|place| {
                if is_at_its_place(place) {
                    return true;
                }
                let mut names_it =
                    found.iter().filter(|(other, now)| *other == id && now.member == place.member);
                if let Some((_, now)) = names_it.next() {
                    *place = *now;
                    return true;
                }
                found.iter().all(|(_, now)| now.nsid != place.nsid)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use riopipe_nvme::digest;
    use riopipe_order::attribute::Member;
    use riopipe_order::log_region::{LogKind, RegionHeader, VolumeRecord, VolumeState};
    use riopipe_order::region::MemRegion;

    use super::*;

    fn place(member: u8, nsid: u32) -> MemberNamespace {
        MemberNamespace { member: Member(member), nsid }
    }

    fn record(id: VolumeId, members: Vec<MemberNamespace>) -> VolumeRecord {
        VolumeRecord {
            id,
            generation: 1,
            state: VolumeState::Owned,
            owner: [1; 16],
            given_up_generation: 0,
            lease_ms: 0,
            streams: 1,
            slots: 4,
            offset: 0,
            members,
        }
    }

    #[test]
    fn t27_members_are_found_at_the_namespaces_that_they_have_now() {
        let (v, w) = (VolumeId([1; 16]), VolumeId([2; 16]));
        let located = |found: &[(VolumeId, MemberNamespace)]| {
            let volumes =
                vec![record(v, vec![place(0, 1), place(3, 2)]), record(w, vec![place(0, 3)])];
            let header = RegionHeader {
                number: 1,
                uuid: [3; 16],
                boot: [4; 16],
                incarnation: 1,
                kind: LogKind::File,
                synced: false,
                len: 0,
                volumes,
            };
            let mut volumes: Volumes<MemRegion> = Volumes::with_lost_log(header, digest::soft);
            volumes.locate_members(found);
            volumes.list.into_iter().map(|volume| volume.members).collect::<Vec<_>>()
        };
        let as_recorded = [vec![place(0, 1), place(3, 2)], vec![place(0, 3)]];
        assert_eq!(located(&[]), as_recorded);
        let all = [(v, place(0, 1)), (v, place(3, 2)), (w, place(0, 3))];
        assert_eq!(located(&all), as_recorded);
        let moved = [(w, place(0, 1)), (v, place(0, 2)), (v, place(3, 3))];
        assert_eq!(located(&moved), [vec![place(0, 2), place(3, 3)], vec![place(0, 1)]]);
        // A drive is missing, and another is at its place. So nothing of the volume is there.
        let replaced = [(w, place(0, 1)), (v, place(3, 2))];
        assert_eq!(located(&replaced), [vec![place(3, 2)], vec![place(0, 1)]]);
        // A drive that claims to be a member that is at its place.
        let forged = [(v, place(0, 4)), (v, place(0, 1)), (v, place(3, 2)), (w, place(0, 3))];
        assert_eq!(located(&forged), as_recorded);
    }
}

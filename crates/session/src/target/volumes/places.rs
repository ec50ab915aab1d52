//! The namespaces at which the members of volumes are now (trap T27).

use alloc::vec::Vec;

use riopipe_order::attribute::VolumeId;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::region::Region;

use super::Volumes;

/// A drive of the target whose label names a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabelledDrive {
    /// The volume.
    pub volume: VolumeId,
    /// The member that the drive is by its label, and the drive's namespace.
    pub place: MemberNamespace,
    /// Whether the label names the identity under which the drive is served. Else the drive is a
    /// copy, or was moved and has not adopted the identity of its label.
    pub is_own: bool,
}

impl<R: Region> Volumes<R> {
    /// Notes where the members of volumes are now, by the labels of the drives. The log's directory
    /// has the namespace ids at which the members were when the volume was made there (trap T27).
    ///
    /// A member that no label names stays where it was, unless another member is there now.
    ///
    /// A plain host can write a label to its own namespace. So a label adds guards and ends none:
    /// every drive whose label names a volume is guarded for it, and so is the recorded place
    /// of a member (trap T21). A claim may name any drive with an own label, or the recorded place.
    pub fn locate_members(&mut self, found: &[LabelledDrive]) {
        let own: Vec<&LabelledDrive> = found.iter().filter(|drive| drive.is_own).collect();
        let is_free = |nsid: u32| own.iter().all(|drive| drive.place.nsid != nsid);
        for volume in &mut self.list {
            let id = volume.id;
            let is_named = |drive: &&&LabelledDrive| drive.volume == id;
            let recorded = volume.members.clone();
            volume.members.retain_mut(|place| {
                let mut named = own.iter().filter(is_named).map(|drive| drive.place);
                if named.clone().any(|now| now == *place) {
                    return true;
                }
                if let Some(now) = named.find(|now| now.member == place.member) {
                    *place = now;
                    return true;
                }
                is_free(place.nsid)
            });
            let named = own.iter().filter(is_named).map(|drive| drive.place);
            let recorded = recorded.into_iter().filter(|place| is_free(place.nsid));
            volume.other_places = recorded.chain(named).collect();
            let labelled = found.iter().filter(|drive| drive.volume == id);
            volume.also_guarded = labelled
                .map(|drive| &drive.place)
                .chain(&volume.other_places)
                .map(|place| place.nsid)
                .collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use riopipe_nvme::digest;
    use riopipe_order::attribute::Member;
    use riopipe_order::log_region::{LogKind, RegionHeader, VolumeRecord, VolumeState};
    use riopipe_order::region::MemRegion;

    use super::super::volume::Volume;
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

    /// Volume 1 has its members 0 and 3 recorded at namespaces 1 and 2, volume 2 has one at 3.
    fn volumes(found: &[LabelledDrive]) -> Volumes<MemRegion> {
        let (v, w) = (VolumeId([1; 16]), VolumeId([2; 16]));
        let header = RegionHeader {
            number: 1,
            uuid: [3; 16],
            boot: [4; 16],
            incarnation: 1,
            kind: LogKind::File,
            synced: false,
            len: 0,
            volumes: vec![record(v, vec![place(0, 1), place(3, 2)]), record(w, vec![place(0, 3)])],
        };
        let mut volumes = Volumes::with_lost_log(header, digest::soft);
        volumes.locate_members(found);
        volumes
    }

    #[test]
    fn t27_members_are_found_at_the_namespaces_that_they_have_now() {
        let (v, w) = (VolumeId([1; 16]), VolumeId([2; 16]));
        let located = |found: &[(VolumeId, MemberNamespace)]| {
            let own = |&(volume, place)| LabelledDrive { volume, place, is_own: true };
            let volumes = volumes(&found.iter().map(own).collect::<Vec<_>>());
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

    /// The drives of volume 1 with these labels, and its guarded namespaces among 1 to 9.
    fn of_first(found: &[(u8, u32, bool)]) -> (Volume<MemRegion>, Vec<u32>) {
        let drive = |&(member, nsid, is_own)| LabelledDrive {
            volume: VolumeId([1; 16]),
            place: place(member, nsid),
            is_own,
        };
        let found: Vec<LabelledDrive> = found.iter().map(drive).collect();
        let volume = volumes(&found).list.swap_remove(0);
        let guarded = (1..10).filter(|nsid| volume.has_member(*nsid)).collect();
        (volume, guarded)
    }

    /// Member 0 was moved to namespace 4. The plain host that has namespace 1 now writes a label of
    /// member 0 with the NGUID of its own drive.
    #[test]
    fn t21_a_label_that_a_plain_host_forged_frees_no_member() {
        let claim = |nsid| [place(3, 2), place(0, nsid)];
        for moved_is_own in [true, false] {
            let found = [(0, 1, true), (0, 4, moved_is_own), (3, 2, true)];
            let (mut volume, guarded) = of_first(&found);
            assert_eq!(guarded, [1, 2, 4], "{moved_is_own}");
            assert!(volume.may_have_members(&claim(1)) && !volume.may_have_members(&claim(5)));
            assert_eq!(volume.may_have_members(&claim(4)), moved_is_own);
            assert!(!volume.may_have_members(&claim(4)[1..]));
            volume.move_members(&claim(4));
            assert_eq!(volume.members, [place(0, 4), place(3, 2)]);
            assert!([1, 2, 4].into_iter().all(|nsid| volume.has_member(nsid)));
            assert!(volume.may_have_members(&claim(4)), "the owner resumes");
        }
        // The forged label is elsewhere, and the member's own label is at its place.
        let (volume, guarded) = of_first(&[(0, 6, true), (0, 1, false), (3, 2, true)]);
        assert_eq!(guarded, [1, 2, 6]);
        assert!(volume.may_have_members(&claim(1)) && volume.may_have_members(&claim(6)));
    }

    #[test]
    fn t21_a_moved_member_that_has_not_adopted_its_identity_is_guarded_where_it_is() {
        let (volume, guarded) = of_first(&[(0, 5, false), (3, 2, true)]);
        assert_eq!(guarded, [1, 2, 5]);
        assert_eq!(volume.members, [place(0, 1), place(3, 2)], "it adds a guard only");
        assert!(!volume.may_have_members(&[place(0, 5), place(3, 2)]));
        // A label that is read at the recorded place of another volume's member.
        let w = LabelledDrive { volume: VolumeId([2; 16]), place: place(0, 1), is_own: false };
        let first = &volumes(&[w]).list[0];
        assert!(first.has_member(1) && first.has_member(2) && !first.has_member(3));
    }
}

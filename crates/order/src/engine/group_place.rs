//! The place of a group, for engines whose drives keep the order (`barrier`, `opimq`): a drive orders
//! only its own writes.

use super::Payload;
use super::base::Base;
use crate::attribute::{Kind, Member};
use crate::probe::{self, Plant};

/// The drives on which a group lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupPlace {
    /// None: the group has no writes.
    Nowhere,
    /// Writes on one drive, which keeps their order.
    Drive(Member),
    /// Several drives, or a discard, which a drive takes only without an order.
    Unordered,
}

impl<P: Payload> Base<P> {
    /// The place of the shaped group.
    pub(super) fn place_of_shaped(&self) -> GroupPlace {
        let Some(first) = self.shaped.first() else { return GroupPlace::Nowhere };
        let member = self.request(*first).member;
        let is_ordered = self.shaped.iter().all(|id| {
            let request = self.request(*id);
            request.member == member
                && (request.kind == Kind::Write || probe::is_bug_planted(Plant::OpimqDiscardEarly))
        });
        if is_ordered { GroupPlace::Drive(member) } else { GroupPlace::Unordered }
    }

    /// Whether two requests of the shaped group, all on one drive, touch the same block.
    pub(super) fn has_overlap(&mut self) -> bool {
        let Self { shaped, requests, extents, .. } = self;
        extents.clear();
        extents.extend(shaped.iter().map(|id| {
            let request = requests.get(*id);
            (request.lba, request.lba + u64::from(request.blocks))
        }));
        extents.sort_unstable();
        extents.windows(2).any(|pair| pair[1].0 < pair[0].1)
    }
}

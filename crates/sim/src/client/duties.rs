//! The caller's duties of T11 and T15, as the simulated application fulfils them.

use riopipe_order::attribute::StreamId;
use riopipe_order::probe::{self, Plant};
use riopipe_session::initiator::volume::block_ownership::BlockOwnershipChecker;

use crate::scenario::{Place, WriteOp};

/// Reduces an intended write to the permitted blocks, and adds it to its group. Blocks that other
/// streams hold are left out. Own blocks that are not released, or that are already in the group,
/// are written in place or extended, not discarded. The volume has `blocks` blocks.
pub(super) fn stage(
    ownership_checker: &BlockOwnershipChecker,
    blocks: usize,
    stream: u16,
    intended: &WriteOp,
    parts: &mut Vec<(u32, u32, Place)>,
) {
    let WriteOp(first, count, wanted) = *intended;
    let staged = parts.len();
    let end = (first + count).min(blocks as u32);
    for block in first..end {
        let mut earlier = parts[..staged].iter();
        let again = earlier.any(|(at, len, _)| (*at..at + len).contains(&block));
        let own = StreamId(stream);
        let holder = if again { Some(own) } else { ownership_checker.holder(block.into()) };
        let place = match holder {
            Some(other) if other != own => {
                if !probe::is_bug_planted(Plant::T15ReuseEarly) {
                    continue;
                }
                wanted
            }
            Some(_) if wanted == Place::Discard => continue,
            Some(_) if wanted == Place::Extend => Place::Extend,
            Some(_) => Place::InPlace,
            None => wanted,
        };
        match parts[staged..].last_mut() {
            Some((at, len, same)) if *at + *len == block && *same == place => *len += 1,
            _ => parts.push((block, 1, place)),
        }
    }
}

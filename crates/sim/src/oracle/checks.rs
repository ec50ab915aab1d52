//! The checks of the promises.

use riopipe_order::attribute::Seq;

use super::blocks::{Block, Wr};
use super::{Drives, Era, Named, Oracle, Promise, Recovered, Where};
use crate::scenario::Place;

impl Oracle {
    /// P3: all writes of all groups up to the mark are done.
    pub(super) fn check_complete(&mut self, era: Era, stream: u16, from: Seq, to: Seq) {
        let history = &self.eras[era][usize::from(stream)];
        let new_groups = &history.groups[history.upto(from)..history.upto(to)];
        let missing = new_groups.iter().find_map(|group| {
            let open = |(block, number): &&(u32, u64)| {
                !self.completed[*number as usize] && !self.blocks[*block as usize].discards(*number)
            };
            group.writes.iter().find(open).map(|(block, _)| (group.seq, *block))
        });
        if let Some((seq, block)) = missing {
            let what = format!(
                "stream {stream}: groups up to {to} were reported complete, but the write of block \
                 {block} in group {seq} was not done"
            );
            self.broken(Promise::P3, what);
        }
    }

    /// P2, P6: if the power were cut now, all of those groups would remain.
    pub(super) fn check_durable(
        &mut self,
        era: Era,
        stream: u16,
        from: Seq,
        to: Seq,
        drives: &Drives<'_>,
    ) {
        let history = &self.eras[era][usize::from(stream)];
        let new_groups = &history.groups[history.upto(from)..history.upto(to)];
        let missing = new_groups.iter().find_map(|group| {
            let lost = |(block, number): &&(u32, u64)| {
                let block = &self.blocks[*block as usize];
                !block.survives(*number, drives.of(block.at).durable(block.at.lba))
                    && !self.is_durable_in_area(block, *number, drives)
            };
            group.writes.iter().find(lost).map(|(block, _)| (group.seq, *block))
        });
        if let Some((seq, block)) = missing {
            let Block { at, .. } = self.blocks[block as usize];
            let uncertain = self.blocks[block as usize].may_have_lost_content();
            let (promise, why) =
                if uncertain { (Promise::P6, "after a failure there") } else { (Promise::P2, "") };
            let what = format!(
                "stream {stream}: groups up to {to} were reported durable, but block {block} of \
                 group {seq} is not durable on {at} {why}"
            );
            self.broken(promise, what);
        }
    }

    /// P2, T26: after a log was given up, everything that was reported durable remains, on every
    /// machine; and the writes beyond the prefix that the other logs report are listed.
    pub(super) fn check_given_up(
        &mut self,
        prefix: &[Seq],
        found: &[Recovered],
        drives: &Drives<'_>,
    ) {
        for (stream, history) in self.eras[self.current].iter().enumerate() {
            let durable = &history.groups[..history.upto(history.durable)];
            let missing = durable.iter().find_map(|group| {
                let lost = |(block, number): &&(u32, u64)| {
                    let block = &self.blocks[*block as usize];
                    // A redirected update that is not home is lost with the log of its drive.
                    let may_be_lost = self.promised.redirects()
                        && self.lost.contains(&block.at.machine)
                        && block.is_update(*number);
                    !may_be_lost
                        && !block.is_left(*number, drives.of(block.at).durable(block.at.lba))
                };
                group.writes.iter().find(lost).map(|(block, _)| (group.seq, *block))
            });
            if let Some((seq, block)) = missing {
                let at = self.blocks[block as usize].at;
                let what = format!(
                    "stream {stream}: a log was given up, and block {block} of group {seq}, which \
                     had been reported durable, is not there any more on {at}"
                );
                return self.broken(Promise::P2, what);
            }
        }
        let listed = |at: Where| found.iter().any(|r| r.in_place.contains(&at));
        // A recovery with all logs may have left a write when it settled the stream. No log reports
        // that write any more.
        let settled = |wr: &Wr| wr.place == Place::Extend && self.settling.contains(&wr.stream);
        let hidden = self.blocks.iter().find(|block| {
            let drive = drives.of(block.at);
            !self.lost.contains(&block.at.machine)
                && !listed(block.at)
                && block
                    .beyond(prefix, drive.block(block.at.lba))
                    .is_some_and(|write| !settled(write))
        });
        if let Some(block) = hidden {
            let what = format!(
                "a log was given up, and {} holds a write beyond the prefix that is not listed ({})",
                block.at,
                block.describe()
            );
            self.broken(Promise::P1, what);
        }
    }

    /// P5: an initiator that opens the volume has read each of its drives. A drive that replaces
    /// another has none of the data that was written there.
    pub(super) fn check_drives(&mut self, labels_read: u64, drives: &Drives<'_>) {
        let wrong = self.replaced.iter().find(|(machine, since)| {
            drives.0[*machine].replaced_drive().is_some() && *since < labels_read
        });
        if let Some((machine, _)) = wrong {
            let what = format!(
                "the volume was opened although machine {machine} had another drive in the place \
                 of one of the volume's"
            );
            self.broken(Promise::P5, what);
        }
    }

    /// P5: a foreign target was sent a command or field of Rio's extension. Its reaction is
    /// undefined (trap T17).
    pub fn extension_was_sent(&mut self, machine: usize, by: &str) {
        let what = format!("target {machine} does not have Rio's extension and was sent {by}");
        self.broken(Promise::P5, what);
    }

    /// P8: the number of volumes that a target remembers is bounded, whatever the requests (trap
    /// T28).
    pub fn remembers(&mut self, machine: usize, volumes: usize, most: usize) {
        if volumes > most {
            let what = format!(
                "target {machine} remembers {volumes} volumes; there can be no more than {most}"
            );
            self.broken(Promise::P8, what);
        }
    }

    /// P5: everything outside of the data area is unchanged, also after a power cut.
    pub(super) fn check_outside(&mut self, drives: &Drives<'_>) {
        let changed = self.outside.iter().find_map(|(at, content)| {
            let drive = drives.of(*at);
            let mut may = drive.possible(at.lba).chain([drive.block(at.lba)]);
            may.find(|found| found != content).map(|found| (*at, *content, found))
        });
        if let Some((at, content, found)) = changed {
            let (was, is) = (Named(content), Named(found));
            let what = format!("{at}, outside of the data area, held {was}, and now holds {is}");
            self.broken(Promise::P5, what);
        }
    }

    /// P1, P2: the prefix ends at a permitted group, and the caller's tag is that of its last
    /// group.
    pub(super) fn check_prefix(&mut self, era: Era, stream: usize, last: Seq, tag: Option<u64>) {
        let history = &self.eras[era][stream];
        let due = history.durable.max(history.start);
        let most = history.last();
        if last < due {
            let what = format!(
                "stream {stream}: recovery found groups up to {last}, but group {due} had been \
                 reported durable"
            );
            return self.broken(Promise::P2, what);
        }
        let tag_due = history.tag_at(last);
        // The engine's own flushes take seqs, too, so the last group may lie a little behind.
        if last > most && last.0 - most.0 > 1 << 20 {
            let what = format!("stream {stream}: recovery found group {last}; the last was {most}");
            return self.broken(Promise::P1, what);
        }
        if let Some(tag) = tag.filter(|tag| *tag != tag_due) {
            let what = format!(
                "stream {stream}: recovery reports tag {tag} of group {last}, not {tag_due}"
            );
            self.broken(Promise::P1, what);
        }
    }

    /// P1, P4, P5: every block holds a permitted content.
    pub(super) fn check_blocks(
        &mut self,
        prefix: &[Seq],
        found: &[Recovered],
        only: Option<u16>,
        drives: &Drives<'_>,
    ) {
        let listed = |at: Where| found.iter().any(|r| r.in_place.contains(&at));
        let wrong = self.blocks.iter().enumerate().find_map(|(number, block)| {
            if only.is_some_and(|stream| !block.has_beyond(stream, prefix[usize::from(stream)])) {
                return None;
            }
            let redirects = self.promised.redirects();
            let what = block.check(prefix, drives, listed(block.at), redirects).err()?;
            Some((what.0, format!("block {number} on {}: {}", block.at, what.1)))
        });
        if let Some((promise, what)) = wrong {
            return self.broken(promise, what);
        }
        for r in found {
            let before = &self.unacknowledged[usize::from(r.stream)];
            let updated = |at: &Where| {
                let block = self.blocks.iter().find(|block| block.at == *at);
                block.is_some_and(|block| block.was_updated_beyond(r.stream, r.last))
            };
            let needless = r.in_place.iter().find(|at| !before.contains(at) && !updated(at));
            if let Some(at) = needless.filter(|_| !self.ever_given_up) {
                let what = format!(
                    "stream {}: {at} is listed, and the stream kept closed, without an in-place \
                     update beyond the prefix",
                    r.stream
                );
                return self.broken(Promise::P1, what);
            }
            if let Some(at) = before.iter().find(|at| !r.in_place.contains(at)) {
                let what = format!(
                    "stream {}: the in-place update of {at} was reported once and is not listed \
                     any more, although it was not acknowledged",
                    r.stream
                );
                return self.broken(Promise::P1, what);
            }
        }
    }
}

//! The opening of a log of records: it is found or created, and checked.

use riopipe_order::attribute::Seq;
use riopipe_order::probe::{self, Rare};
use riopipe_platform::crc32c;
use riopipe_session::initiator::stream_driver::Until;
use riopipe_wal_core::Lsn;
use riopipe_wal_core::format::{Anchor, begin};
use riopipe_wal_core::opening::{End, FindError, Settling, find_end};
use riopipe_wal_core::reading::Span;
use riopipe_wal_core::writer::{Config, Writer};

use super::{Committer, Job, Open, record_blocks, records, report_violation};
use crate::block::BLOCK;
use crate::client::application::Process;
use crate::client::stream::Stream;
use crate::core::Core;
use crate::oracle::{FoundLog, Promise, Record};
use crate::scenario::Place;

impl Committer {
    pub(super) fn find(
        &mut self,
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        // Later writes make the tag obsolete.
        let last = stream.driver().map(|driver| driver.last());
        let tagged = self.recovered.filter(|(seq, _)| Some(*seq) == last);
        let tag = tagged.map(|(_, tag)| tag).filter(|tag| *tag > 0);
        let first = u64::from(self.spec.first);
        let found = self.decide(stream, core, |ring, read| {
            let mut block = [0; BLOCK];
            read(first, &mut block)?;
            let anchor = match Anchor::parse(&block, crc32c) {
                Ok(anchor) => anchor,
                Err(error) => return Ok(Err(format!("it has no anchor: {error}"))),
            };
            let mut in_ring = |place: u64, bytes: &mut [u8]| read(ring.lba(place), bytes);
            match find_end(ring, anchor.log, crc32c, tag, &mut in_ring) {
                Ok(end) => Ok(Ok((anchor, end))),
                Err(FindError::Read(not_yet)) => Err(not_yet),
                Err(error) => Ok(Err(error.to_string())),
            }
        });
        let Some(found) = found else { return self.is_reading };
        match found {
            Ok((anchor, end)) => {
                let place = (u64::from(self.spec.first), u64::from(self.spec.blocks));
                if (anchor.start, anchor.blocks) != place {
                    self.is_broken(Promise::P5, "another log is in its place", stream, core);
                    return false;
                }
                self.read.clear();
                let Some(logged) = stream.keeps_log() else { return false };
                if logged {
                    return self.checks(anchor.log, end);
                }
                let (log, settling) = (anchor.log, Settling::new(end, anchor.log, crc32c));
                self.job = Job::Settle { log, end, settling, last: None, at: 0 };
                true
            }
            Err(why) if core.logs[self.nth].is_created => {
                self.is_broken(Promise::P2, &why, stream, core);
                false
            }
            Err(_) => self.create(stream, process, core),
        }
    }

    pub(super) fn create(
        &mut self,
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        let (log, epoch) = (core.rng.u64(), core.rng.u64());
        let (start, blocks) = (u64::from(self.spec.first), u64::from(self.spec.blocks));
        let mut bytes = vec![0; 2 * BLOCK];
        begin(&Anchor { log, start, blocks }, epoch, crc32c, &mut bytes);
        let end = End::of_new(epoch);
        let parts = [(start, record_blocks(&bytes, core))];
        let place = Place::Fresh;
        match stream.submit_log(&parts, place, end.number, true, process, core) {
            Some(seq) => self.job = Job::Create { seq, log, end },
            None => return false,
        }
        true
    }

    /// Writes the last blocks of the log of records again, and waits until they are durable.
    /// Without ordering logs, opening a volume flushes nothing.
    pub(super) fn rewrite_last_blocks(
        &mut self,
        (log, end, mut settling): (u64, End, Settling),
        (last, at): (Option<Seq>, usize),
        stream: &mut Stream,
        process: &mut Process<'_, '_>,
        core: &mut Core,
    ) -> bool {
        let mut blocks = end.to_settle().skip(at);
        let Some(unsettled) = blocks.next() else {
            return match last {
                Some(seq) => self.is_durable(seq, stream) && self.checks(log, end),
                None => self.checks(log, end),
            };
        };
        let block = unsettled.lba(u64::from(self.spec.first), self.ring);
        let read = self.decide(stream, core, |_, read| {
            let mut bytes = vec![0; BLOCK];
            read(block, &mut bytes).map(|()| bytes)
        });
        let Some(bytes) = read else { return self.is_reading };
        if let Err(changed) = settling.check(unsettled, &bytes) {
            stream.leave(&changed.to_string(), core);
            return false;
        }
        let parts = [(block, record_blocks(&bytes, core))];
        let Some(seq) = stream.submit_log(&parts, Place::InPlace, 0, false, process, core) else {
            return false;
        };
        self.read.clear();
        self.job = Job::Settle { log, end, settling, last: Some(seq), at: at + 1 };
        probe::count_rare(Rare::RecordsSettled);
        if blocks.next().is_none()
            && let Some(driver) = stream.driver()
        {
            // The group was submitted, so the wait can begin.
            let _ = driver.begin_wait(Until::Durable(seq));
        }
        true
    }

    /// Reads the records and the last checkpoint of the log, and compares them with the promises.
    pub(super) fn check(
        &mut self,
        log: u64,
        end: &End,
        stream: &mut Stream,
        core: &mut Core,
    ) -> bool {
        let blocks = end.oldest..end.number;
        let found = self.decide(stream, core, |ring, read| {
            let span = Span { ring, log, crc: crc32c, from: end.trim, blocks: blocks.clone() };
            let checkpoint = match end.checkpoint {
                Some(from) => {
                    records(Span { from, ..span.clone() }, 1, read)?.map(|mut all| all.pop())
                }
                None => Ok(None),
            };
            let all = records(span, usize::MAX, read)?;
            Ok(checkpoint.and_then(|checkpoint| all.map(|records| (checkpoint, records))))
        });
        let Some(found) = found else { return self.is_reading };
        self.read.clear();
        let (checkpoint, records) = match found {
            Ok(found) => found,
            Err(why) => {
                self.is_broken(Promise::P1, &why, stream, core);
                return false;
            }
        };
        let lsn = |record: &Record| Lsn(record.lsn);
        let all = records.iter().map(lsn).collect();
        let checkpoints = records.iter().filter(|it| it.checkpoint).map(lsn).collect();
        let found = FoundLog { end: end.lsn.0, trim: end.trim.0, checkpoint, records };
        let nth = self.nth;
        core.trace(|| {
            let (end, trim, all) = (found.end, found.trim, found.records.len());
            format!("log {nth}: open, {all} records, Lsn {trim} to {end}")
        });
        let mut opening = None;
        if !core.oracle.is_stale(stream.era) {
            match core.logs[nth].opened(&found) {
                Ok(number) => {
                    if end.number > self.ring.blocks() {
                        probe::count_rare(Rare::RecordsLapped);
                    }
                    core.logs[nth].is_created = true;
                    opening = Some(number);
                }
                Err(broken) => report_violation(Err(broken), core),
            }
        }
        let Some(config) = self.config(log, stream, core) else { return false };
        self.open = Some(Box::new(Open {
            log,
            writer: Writer::new(config, end),
            queue: Vec::new(),
            end: end.lsn,
            wanted: end.lsn,
            trimmed: end.trim,
            refused: None,
            opening,
            records: all,
            checkpoints,
        }));
        self.job = Job::Serve;
        true
    }

    fn config(&self, log: u64, stream: &mut Stream, core: &mut Core) -> Option<Config> {
        let driver = stream.driver()?;
        let durable = driver.config().engine.capabilities().completes_durable;
        Some(Config {
            log,
            ring: self.ring,
            epoch: core.rng.u64(),
            volatile: !durable && driver.topology().has_volatile_member(),
            groups: self.spec.groups as usize,
            flushes: self.spec.flushes as usize,
            group_blocks: u64::from(self.spec.group_blocks),
            crc: crc32c,
        })
    }
}

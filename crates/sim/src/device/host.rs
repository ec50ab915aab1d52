//! The host of a plain device, and its model: which contents each block may have.
//!
//! The model knows nothing of streams and groups. Requests take effect on a block in the order in which
//! they came. So a block has the content of one of the changes from some change on: the newest one that
//! must be there.

use std::collections::BTreeMap;

use super::shell::{Found, Token};

/// The finding where there are zeroes.
const ZERO: Found = 0;

/// A count of requests and results: the time of the model.
type Tick = u64;

/// A change of a block.
#[derive(Clone, Copy, Debug)]
struct Version {
    token: Token,
    /// The blocks are zeroed.
    is_zero: bool,
    /// When its request has succeeded.
    completed: Option<Tick>,
    /// It was confirmed as durable.
    is_durable: bool,
}

impl Version {
    const fn content(&self) -> Found {
        if self.is_zero { ZERO } else { self.token }
    }
}

/// The history of a block since the volume was attached.
#[derive(Clone, Debug)]
struct Block {
    /// The content before the first change.
    base: Found,
    /// The contents that may come back instead of it, because a drive has failed a write or a FLUSH: the
    /// FLUSH of the next owner succeeds, and does not reach data that the drive has dropped.
    older: Vec<Found>,
    versions: Vec<Version>,
}

/// A request in flight.
#[derive(Clone, Debug)]
pub(super) enum Request {
    /// A write or zeroes of these blocks.
    Change { first: u32, blocks: u32, is_fua: bool },
    /// A flush, which covers what had completed at this time.
    Flush(Tick),
    /// A read that began at this time.
    Read(Tick),
}

/// How much of the past must be there after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// All that was confirmed as durable.
    Durable,
    /// All that has completed.
    Completed,
}

/// The model.
#[derive(Debug)]
pub(super) struct Model {
    blocks: Vec<Block>,
    now: Tick,
    next_token: Token,
    pub(super) in_flight: BTreeMap<Token, Request>,
    /// A request has failed: nothing succeeds any more.
    has_failed: bool,
}

impl Model {
    /// A device of zeroes.
    pub(super) fn new(blocks: usize) -> Self {
        Self {
            blocks: vec![Block { base: ZERO, older: Vec::new(), versions: Vec::new() }; blocks],
            now: 0,
            next_token: 0,
            in_flight: BTreeMap::new(),
            has_failed: false,
        }
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }

    fn begin(&mut self, request: Request) -> Token {
        self.next_token += 1;
        self.in_flight.insert(self.next_token, request);
        self.next_token
    }

    /// A write to these blocks, or zeroes, begins.
    pub(super) fn change(
        &mut self,
        (first, blocks): (u32, u32),
        is_zero: bool,
        is_fua: bool,
    ) -> Token {
        self.tick();
        let token = self.begin(Request::Change { first, blocks, is_fua });
        for block in &mut self.blocks[first as usize..(first + blocks) as usize] {
            block.versions.push(Version { token, is_zero, completed: None, is_durable: false });
        }
        token
    }

    /// A flush begins.
    pub(super) fn flush(&mut self) -> Token {
        let now = self.tick();
        self.begin(Request::Flush(now))
    }

    /// A read begins.
    pub(super) fn read(&mut self) -> Token {
        let now = self.tick();
        self.begin(Request::Read(now))
    }

    /// A request that is no read has ended.
    pub(super) fn ended(&mut self, token: Token, is_done: bool) -> Result<Request, String> {
        let now = self.tick();
        let request = self.in_flight.remove(&token);
        let request = request.ok_or_else(|| format!("request {token} ends twice"))?;
        if !is_done {
            self.has_failed = true;
            return Ok(request);
        }
        if self.has_failed {
            return Err(format!(
                "request {token} succeeds after another one has failed: {request:?}"
            ));
        }
        match request {
            Request::Change { first, blocks, is_fua } => {
                for block in &mut self.blocks[first as usize..(first + blocks) as usize] {
                    for version in block.versions.iter_mut().filter(|it| it.token == token) {
                        (version.completed, version.is_durable) = (Some(now), is_fua);
                    }
                }
            }
            Request::Flush(since) => {
                let versions = self.blocks.iter_mut().flat_map(|block| &mut block.versions);
                for version in versions {
                    version.is_durable |= version.completed.is_some_and(|at| at < since);
                }
            }
            Request::Read(_) => {}
        }
        Ok(request)
    }

    /// A read has found these contents; `None`: it has failed.
    pub(super) fn read_ended(
        &mut self,
        (token, first): (Token, u32),
        found: Option<&[Found]>,
        (kept, has_failed): (Kept, bool),
    ) -> Result<(), String> {
        self.tick();
        let Some(Request::Read(since)) = self.in_flight.remove(&token) else {
            return Err(format!("read {token} ends twice"));
        };
        match found {
            None if has_failed => Ok(()),
            None => Err(format!("read {token} fails, and the device has not failed")),
            Some(found) => self.check(first, found, |version: &Version| {
                let is_kept = kept == Kept::Completed || version.is_durable;
                is_kept && version.completed.is_some_and(|at| at < since)
            }),
        }
    }

    /// Checks that each block has the content of a change from the newest one on that must be there.
    fn check(
        &self,
        first: u32,
        found: &[Found],
        must_be_there: impl Fn(&Version) -> bool,
    ) -> Result<(), String> {
        let blocks = self.blocks[first as usize..].iter().zip(found).enumerate();
        for (nth, (block, found)) in blocks {
            let newest = block.versions.iter().rposition(&must_be_there);
            let possible = &block.versions[newest.unwrap_or(0)..];
            let is_older = block.older.contains(found);
            let is_base = newest.is_none() && (*found == block.base || is_older);
            if !is_base && !possible.iter().any(|version| version.content() == *found) {
                let at = first as usize + nth;
                let before = block.versions.iter().any(|version| version.content() == *found);
                let age = if before || *found == block.base { "an older" } else { "a foreign" };
                return Err(format!(
                    "block {at} has {age} content, of write {found}; before of {}, then {:?}",
                    block.base, block.versions
                ));
            }
        }
        Ok(())
    }

    /// The volume was attached again, and these contents were found. Requests in flight were cut. They
    /// may have had their effect, or not, and will have none from now on.
    ///
    /// Attaching flushes the drives, so all of that is durable, unless one has failed (`has_drive_fault`).
    pub(super) fn attached(
        &mut self,
        found: &[Found],
        kept: Kept,
        has_drive_fault: bool,
    ) -> Result<(), String> {
        self.check(0, found, |version| match kept {
            Kept::Durable => version.is_durable,
            Kept::Completed => version.completed.is_some(),
        })?;
        for (block, found) in self.blocks.iter_mut().zip(found) {
            let newest = block.versions.iter().rposition(|version| version.is_durable);
            let mut older = core::mem::take(&mut block.older);
            match newest {
                Some(_) => older.clear(),
                None => older.push(block.base),
            }
            let rest = &block.versions[newest.unwrap_or(0)..];
            older.extend(rest.iter().map(Version::content));
            if !has_drive_fault {
                older.clear();
            }
            *block = Block { base: *found, older, versions: Vec::new() };
        }
        self.in_flight.clear();
        self.has_failed = false;
        Ok(())
    }

    /// Checks the content of the whole device, on which nothing is in flight.
    pub(super) fn check_all(&self, found: &[Found]) -> Result<(), String> {
        self.check(0, found, |version| version.completed.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_knows_what_a_flush_a_read_and_a_crash_may_show() {
        let mut model = Model::new(2);
        let one = model.change((0, 2), false, false);
        let read = model.read();
        model.ended(one, true).unwrap();
        model
            .read_ended((read, 0), Some(&[0, one]), (Kept::Completed, false))
            .expect("it had begun before");
        let read = model.read();
        assert!(model.read_ended((read, 0), Some(&[0, one]), (Kept::Completed, false)).is_err());
        let two = model.change((0, 1), false, false);
        let flush = model.flush();
        model.ended(two, true).unwrap();
        model.ended(flush, true).unwrap();
        assert!(
            model.attached(&[0, one], Kept::Durable, false).is_err(),
            "the flush covers the first"
        );
        assert!(
            model.attached(&[one, one], Kept::Completed, false).is_err(),
            "the second has completed"
        );
        model.attached(&[one, one], Kept::Durable, false).expect("it does not cover the second");
        assert!(model.attached(&[two, one], Kept::Durable, false).is_err(), "the second is over");
        let three = model.change((1, 1), true, true);
        model.ended(three, true).unwrap();
        assert!(model.check_all(&[one, one]).is_err() && model.check_all(&[one, 0]).is_ok());
        let four = model.change((1, 1), false, true);
        model.ended(four, false).unwrap();
        assert!(model.ended(four, true).is_err(), "twice");
        let five = model.flush();
        assert!(model.ended(five, true).is_err(), "after a failure");
    }
}

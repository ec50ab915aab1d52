//! Reading the log of a discovery service (Base §5.16.1.23).

use alloc::vec::Vec;

use riopipe_nvme::command::Sqe;
use riopipe_nvme::discovery::{self, Entry, Header};
use riopipe_nvme::log_page;

pub use super::bring_up::AttachError;
use super::bring_up::{BringUp, Reply};
use super::queue_pair::QpConfig;
use crate::outbox::Outbox;

/// Limit of the records of a log.
pub const RECORDS_MAX: u64 = 4096;
/// Number of records read by one command: as many as fit into a memory page.
const CHUNK: u64 = 4;
/// The most repetitions of the reading because the log changed while it was read.
const RETRIES: u32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Enable,
    Header,
    Records,
    /// The header again: if the generation is the same, the records belong together.
    Check,
    Done,
}

/// The reading of a discovery log. The caller passes the arriving bytes and the time to it, and
/// sends its outbox.
#[derive(Debug)]
pub struct Discover<P> {
    bring_up: BringUp<P>,
    step: Step,
    header: Header,
    entries: Vec<Entry>,
    retries: u32,
}

impl<P: AsRef<[u8]> + Clone> Discover<P> {
    /// Reads the log of the discovery subsystem that `config` (an admin queue's) names: commonly
    /// [`DISCOVERY_NQN`](riopipe_nvme::fabrics::DISCOVERY_NQN).
    #[must_use]
    pub fn new(config: QpConfig) -> Self {
        Self {
            bring_up: BringUp::new(config),
            step: Step::Enable,
            header: Header { genctr: 0, numrec: 0, recfmt: 0 },
            entries: Vec::new(),
            retries: 0,
        }
    }

    /// Begins to read: sends the first PDU.
    pub fn start(&mut self, out: &mut Outbox<P>) {
        self.bring_up.start(out);
    }

    /// When [`Discover::tick`] has work to do, in nanoseconds of the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.bring_up.next_deadline()
    }

    /// Does the work that is due at `now`, ns.
    pub fn tick(&mut self, now: u64, out: &mut Outbox<P>) {
        self.bring_up.tick(now, out);
    }

    /// Takes the whole PDUs at the start of `buf`; returns their length in bytes.
    ///
    /// # Errors
    /// The log cannot be read; the outbox may hold a last PDU to the service.
    pub fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        out: &mut Outbox<P>,
    ) -> Result<usize, AttachError> {
        let (used, reply) = self.bring_up.receive(now, buf, out)?;
        let Some(Reply::Done(cqe)) = reply else { return Ok(used) };
        self.bring_up.exchange.succeeded(&cqe)?;
        match self.step {
            Step::Enable => self.read_header(Step::Header, out),
            Step::Header => {
                self.header = self.decode_header()?;
                self.entries.clear();
                self.read_records(out);
            }
            Step::Records => {
                for record in self.bring_up.exchange.page.chunks_exact(discovery::ENTRY_LEN) {
                    self.entries.push(Entry::decode(record)?);
                }
                self.read_records(out);
            }
            Step::Check => {
                let header = self.decode_header()?;
                if header == self.header {
                    self.step = Step::Done;
                } else if self.retries == RETRIES {
                    return Err(AttachError::Unstable(RETRIES + 1));
                } else {
                    self.retries += 1;
                    self.header = header;
                    self.entries.clear();
                    self.read_records(out);
                }
            }
            Step::Done => {}
        }
        Ok(used)
    }

    /// The bytes that the next PDU in `buf` needs.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.bring_up.exchange.qp.need(buf)
    }

    /// The log's records, once all are read.
    #[must_use]
    pub fn entries(&self) -> Option<&[Entry]> {
        (self.step == Step::Done).then_some(&self.entries[..])
    }

    fn decode_header(&self) -> Result<Header, AttachError> {
        let header = Header::decode(&self.bring_up.exchange.page)?;
        if header.recfmt != 0 {
            return Err(AttachError::Unusable("its discovery log has an unknown format"));
        }
        if header.numrec > RECORDS_MAX {
            return Err(AttachError::Unusable("its discovery log has more than 4096 records"));
        }
        Ok(header)
    }

    fn read_header(&mut self, step: Step, out: &mut Outbox<P>) {
        self.step = step;
        self.read(0, discovery::HEADER_LEN as u32, out);
    }

    /// Reads the next records, or the header again after the last.
    fn read_records(&mut self, out: &mut Outbox<P>) {
        let have = self.entries.len() as u64;
        let want = (self.header.numrec - have).min(CHUNK);
        if want == 0 {
            self.read_header(Step::Check, out);
            return;
        }
        self.step = Step::Records;
        let at = discovery::HEADER_LEN as u64 + have * discovery::ENTRY_LEN as u64;
        self.read(at, want as u32 * discovery::ENTRY_LEN as u32, out);
    }

    fn read(&mut self, offset: u64, len: u32, out: &mut Outbox<P>) {
        let sqe = Sqe::get_log_page(log_page::DISCOVERY, 0, offset, len);
        self.bring_up.exchange.ask("reading the discovery log", sqe, len, out);
    }
}

#[cfg(test)]
mod tests;

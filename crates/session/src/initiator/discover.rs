//! Reading the log of a discovery service (Base §5.16.1.23).
//!
//! ```text
//! bring-up → header → records, a few at a time → header again → done
//!              ↑_______ the log has changed ________|
//! ```

use alloc::vec::Vec;

use riopipe_nvme::command::Sqe;
use riopipe_nvme::discovery::{self, Entry, Header};
use riopipe_nvme::log_page;

pub use super::bring_up::AttachError;
use super::bring_up::{BringUp, Received, Reply};
use super::queue_pair::QpConfig;
use crate::outbox::Outbox;

/// Limit of the records of a log.
pub const RECORDS_MAX: u64 = 4096;
/// The most records that one command reads: as many as fit into a memory page.
const RECORDS_PER_READ: u64 = 4;
/// How often the reading is repeated at most because the log changed while it was read.
const RETRIES_MAX: u32 = 10;

/// The step of the reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The bring-up is running.
    BringUp,
    /// The header has been requested.
    ReadHeader,
    /// Some records have been requested.
    ReadRecords,
    /// The header has been requested again. If its generation counter (GENCTR) is the same, the
    /// records belong together.
    CheckHeader,
    /// The log has been read.
    Done,
}

/// The reading of a discovery log. The caller passes the arriving bytes and the time to it, and
/// sends its outbox.
#[derive(Debug)]
pub struct Discover<P> {
    bring_up: BringUp<P>,
    step: Step,
    /// The header that was read last.
    header: Header,
    /// The records that were read so far.
    entries: Vec<Entry>,
    /// The number of times that the reading was begun again.
    retries: u32,
}

impl<P: AsRef<[u8]> + Clone> Discover<P> {
    /// Reads the log of the discovery subsystem that `config` (an admin queue's) names: commonly
    /// [`DISCOVERY_NQN`](riopipe_nvme::fabrics::DISCOVERY_NQN).
    #[must_use]
    pub fn new(config: QpConfig) -> Self {
        Self {
            bring_up: BringUp::new(config),
            step: Step::BringUp,
            header: Header { genctr: 0, numrec: 0, recfmt: 0 },
            entries: Vec::new(),
            retries: 0,
        }
    }

    /// Begins to read: sends the first PDU.
    pub fn start(&mut self, outbox: &mut Outbox<P>) {
        self.bring_up.start(outbox);
    }

    /// When [`Discover::tick`] has work to do, in nanoseconds of the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.bring_up.next_deadline()
    }

    /// Does the work that is due at `now`, ns.
    pub fn tick(&mut self, now: u64, outbox: &mut Outbox<P>) {
        self.bring_up.tick(now, outbox);
    }

    /// Takes the whole PDUs at the start of `buf`; returns their length in bytes.
    ///
    /// # Errors
    /// The log cannot be read; the outbox may hold a last PDU to the service.
    pub fn receive(
        &mut self,
        now: u64,
        buf: &[u8],
        outbox: &mut Outbox<P>,
    ) -> Result<usize, AttachError> {
        let Received { used, reply } = self.bring_up.receive(now, buf, outbox)?;
        if let Some(Reply::Done(cqe)) = reply {
            self.bring_up.exchange.check_success(&cqe)?;
            self.handle_page(outbox)?;
        }
        Ok(used)
    }

    /// Handles the page that the command of the present step has read, and sends the next command.
    fn handle_page(&mut self, outbox: &mut Outbox<P>) -> Result<(), AttachError> {
        match self.step {
            Step::BringUp => self.read_header(Step::ReadHeader, outbox),
            Step::ReadHeader => {
                self.header = self.decode_header()?;
                self.entries.clear();
                self.read_records(outbox);
            }
            Step::ReadRecords => {
                for record in self.bring_up.exchange.page.chunks_exact(discovery::ENTRY_LEN) {
                    self.entries.push(Entry::decode(record)?);
                }
                self.read_records(outbox);
            }
            Step::CheckHeader => {
                let header = self.decode_header()?;
                if header == self.header {
                    self.step = Step::Done;
                } else if self.retries == RETRIES_MAX {
                    return Err(AttachError::Unstable(RETRIES_MAX + 1));
                } else {
                    self.retries += 1;
                    self.header = header;
                    self.entries.clear();
                    self.read_records(outbox);
                }
            }
            Step::Done => {}
        }
        Ok(())
    }

    /// The bytes that the next PDU in `buf` needs.
    #[must_use]
    pub fn need(&self, buf: &[u8]) -> usize {
        self.bring_up.exchange.queue_pair.need(buf)
    }

    /// The log's records, once all are read.
    #[must_use]
    pub fn entries(&self) -> Option<&[Entry]> {
        (self.step == Step::Done).then_some(&self.entries[..])
    }

    /// Decodes the header in the page, and checks that the log can be read.
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

    /// Requests the header, for `step`.
    fn read_header(&mut self, step: Step, outbox: &mut Outbox<P>) {
        self.step = step;
        self.read_log(0, discovery::HEADER_LEN as u32, outbox);
    }

    /// Requests the next records. After the last one, requests the header again.
    fn read_records(&mut self, outbox: &mut Outbox<P>) {
        let read_count = self.entries.len() as u64;
        let next_count = (self.header.numrec - read_count).min(RECORDS_PER_READ);
        if next_count == 0 {
            self.read_header(Step::CheckHeader, outbox);
            return;
        }
        self.step = Step::ReadRecords;
        let offset = discovery::HEADER_LEN as u64 + read_count * discovery::ENTRY_LEN as u64;
        self.read_log(offset, next_count as u32 * discovery::ENTRY_LEN as u32, outbox);
    }

    /// Requests `len` bytes of the log from `offset` on, both in bytes.
    fn read_log(&mut self, offset: u64, len: u32, outbox: &mut Outbox<P>) {
        let sqe = Sqe::get_log_page(log_page::DISCOVERY, 0, offset, len);
        self.bring_up.exchange.send_command("reading the discovery log", sqe, len, outbox);
    }
}

#[cfg(test)]
mod tests;

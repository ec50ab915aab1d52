//! Ordered volumes over NVMe-oF: writes keep their order, and the program does not wait between
//! them.
//!
//! A [`Volume`] spans drives on one or several targets. A [`Stream`] of it takes *groups* of
//! writes. Groups are ordered; the writes inside one group are not. After a crash the volume holds,
//! for each stream, every group up to some group and no fresh block of a later one.
//!
//! `docs/glossary.md` explains each term. Numbers such as T8 (a trap) and P2 (a promise) refer to
//! `docs/ordering-contract.md`.
//!
//! ```no_run
//! use riopipe::{OpenOptions, Place, StreamOptions, Until, Volume};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let members = ["10.0.0.1:4420".parse()?, "10.0.0.2:4420".parse()?];
//! let (volume, recovery) = Volume::open("logs", &members, &OpenOptions::default())?;
//! println!("{recovery}"); // the findings after a crash, or "nothing to recover"
//! let mut stream = volume.stream(0, &StreamOptions::default())?;
//!
//! let mut record = stream.buf(4096)?;
//! record[..5].copy_from_slice(b"hello");
//! stream.group().write(0, record, Place::Fresh).tag(1).submit()?; // returns at once
//!
//! let commit = stream.buf(4096)?;
//! let seq = stream.group().write(1, commit, Place::Fresh).tag(2).submit_durable()?;
//! stream.wait(Until::Durable(seq), None)?; // both groups are durable
//!
//! stream.close()?;
//! volume.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Failures
//!
//! - **This process dies.** Its targets keep the volume for it until its lease is over
//!   ([`OpenOptions::wait_for_lease`], [`OpenOptions::take_over`]). The next [`Volume::open`], by
//!   any initiator, recovers the volume. It returns, for each stream, the last group and its tag,
//!   the undone blocks, and the in-place updates that may be there or not. [`Volume::recover`] does
//!   the same by hand, or only reports what it would do.
//! - **A target dies or a connection breaks.** Streams wait for the target, for
//!   [`ConnectOptions::loss_timeout`] at most. When it is back, they replay the requests that it
//!   has lost. If it does not come back in time, the streams that need it fail.
//! - **A stream fails.** Each of its calls returns the cause, and other streams continue.
//!   [`Stream::reopen`] undoes the fresh writes beyond its last whole group, and restarts it.
//!
//! # A block that is written again as it fills
//!
//! The last block of a log is written again with each record that is added to it. Its old content
//! may still be needed, so the write is not [`Place::Fresh`]. But the new content contains all of
//! the old, so either serves: the caller declares [`Place::Extend`]. After a crash such a block is
//! not zeroed, and needs no acknowledgement. It may hold records of groups beyond the recovered
//! one. Each record has a number, and the recovered tag is the number of the last record that
//! counts.
//!
//! ```no_run
//! # use riopipe::{Place, Stream};
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! const RECORD: usize = 64;
//! const RECORDS: usize = 4096 / RECORD;
//!
//! /// The last block of a log. Each record has its number and a checksum. The tag of each group is
//! /// the number of its last record.
//! struct Tail {
//!     block: [u8; 4096],
//! }
//!
//! impl Tail {
//!     /// After recovery: removes the records beyond record `last`, the recovered tag. The first
//!     /// group does that, before the same numbers are used again.
//!     fn cut(&mut self, stream: &mut Stream, last: u64) -> Result<()> {
//!         let used = last as usize % RECORDS;
//!         self.block[used * RECORD..].fill(0);
//!         if used > 0 { self.write(stream, last, Place::Extend) } else { Ok(()) }
//!     }
//!
//!     /// Appends record `number`, the next one.
//!     fn append(
//!         &mut self,
//!         stream: &mut Stream,
//!         number: u64,
//!         record: &[u8; RECORD],
//!     ) -> Result<()> {
//!         let at = (number - 1) as usize % RECORDS;
//!         let place = if at == 0 { Place::Fresh } else { Place::Extend };
//!         if at == 0 {
//!             self.block.fill(0);
//!         }
//!         self.block[at * RECORD..][..RECORD].copy_from_slice(record);
//!         self.write(stream, number, place)
//!     }
//!
//!     fn write(&self, stream: &mut Stream, last: u64, place: Place) -> Result<()> {
//!         let mut buf = stream.buf(4096)?;
//!         buf.copy_from_slice(&self.block);
//!         let lba = (last - 1) / RECORDS as u64;
//!         stream.group().write(lba, buf, place).tag(last).submit()?;
//!         Ok(())
//!     }
//! }
//! ```
//!
//! The example `extend_the_tail` is a whole program. `docs/ordering-contract.md` defines exactly
//! what the caller declares (trap T11).
//!
//! # Metrics
//!
//! [`Volume::stat`] returns the marks of each stream, and the time that groups spend in each stage.
//! [`Volume::stat_source`] has the same figures as text for Prometheus and as JSON, for the
//! program's own HTTP server. No stream waits for either.
//!
//! # Threads
//!
//! A stream belongs to one thread at a time, its *owner*. The owner's calls build the requests,
//! send them, and receive the answers. A write passes through no lock and no other thread: there is
//! only a flag that shows which thread has the stream. While the owner is not calling, the
//! background thread of the volume drives the stream: at once if other threads watch it, and
//! otherwise after 50 ms ([when bytes leave](Stream#when-bytes-leave)). One thread for each target
//! keeps the association with it alive, and makes new connections.
//!
//! A [`Watch`] is for other threads and for async code: it blocks until a group is complete or
//! durable, or returns a future for that. A [`StreamWaker`] interrupts the owner's
//! [wait](Stream::wait). [`Stream::event_fd`] is for event loops. In the example `group_commit`
//! many threads append, and one of them commits for all.

mod addr;
mod association;
mod background;
mod call_error;
mod connections;
mod create;
mod create_error;
mod dial;
mod error;
mod failure;
mod following;
mod group;
mod identity;
mod info;
mod lock;
mod open;
mod open_volume;
mod options;
mod owner_call;
mod piece;
mod published_marks;
mod reader;
mod reading;
mod recover;
mod recovery;
mod redirections;
mod signal;
mod sockets;
mod staged;
mod start;
mod stat;
mod stream;
mod stream_handle;
mod stream_shell;
mod submitted_reads;
mod survey;
mod sync;
mod target;
mod time;
pub mod undone;
mod volume;
mod waiters;
mod waking;
mod watch;

pub use addr::{MemberAddr, ParseMemberError, TargetAddr};
pub use association::discover;
pub use call_error::{AttachError, CallError};
pub use create::CreateOptions;
pub use create_error::CreateError;
pub use error::{
    AcknowledgeError, Bound, BufError, CloseError, OpenError, ReadError, RecoverError, ReopenError,
    StreamError, StreamOptionsError, SubmitError, SubmitErrorKind, UnreachableReason, WaitError,
};
pub use failure::{Absence, Exhausted, FailureCause, StreamFailure};
pub use group::Group;
pub use identity::{
    ConnectOptions, Dhchap, DhchapSecret, DhchapSecretError, SecretFileError, TlsPsk, TlsPskError,
};
pub use info::{MemberInfo, OpeningState, Outlook, VolumeInfo};
pub use options::{ReaderOptions, StreamOptions};
pub use piece::Buf;
pub use reader::Reader;
pub use reading::ReadExtent;
pub use recovery::{BlockRange, EngineUnavailable, InPlaceRange, Recovery, Steps, StreamRecovery};
pub use riopipe_metrics::{StageStat, StatError, StatSource};
pub use riopipe_nvme::discovery;
pub use riopipe_order::attribute::{Seq, StreamId, VolumeId};
pub use riopipe_order::block_device::BLOCK_BYTES;
pub use riopipe_order::engine::{Capabilities, EngineKind, Marks, Place};
pub use riopipe_platform::crc32c;
pub use riopipe_session::claim::ClaimError;
pub use riopipe_session::initiator::stream_driver::Until;
pub use riopipe_session::stages;
pub use stat::{StreamStat, TargetStat, VolumeStat};
pub use stream::{Stream, StreamNotClosed};
pub use submitted_reads::{ReadEnd, ReadId, ReadMemory, ReadNotSubmitted};
pub use survey::{
    DeleteError, DeletedVolume, FreedLog, ListError, ListedDrive, ListedLog, ListedMember,
    ListedTarget, ListedVolume, VolumeList,
};
pub use volume::{NotClosed, OpenOptions, RecoverOptions, RecoverProgress, Volume};
pub use waking::{StreamFd, StreamWaker};
pub use watch::{MarkWait, Watch};

/// The causes in this crate's errors that come from the layers below, for programs that match on
/// them.
pub mod cause {
    pub use riopipe_net::ConnectError;
    pub use riopipe_nvme::command::Status;
    pub use riopipe_order::ownership::Violation;
    pub use riopipe_order::recovery::DecideError;
    pub use riopipe_order::topology::TopologyError;
    pub use riopipe_session::engine_choice::Lack;
    pub use riopipe_session::initiator::association::{AskError, AssociationError, ConnectFailure};
    pub use riopipe_session::initiator::attach::AttachError as BringUpError;
    pub use riopipe_session::initiator::keep_alive::Loss;
    pub use riopipe_session::initiator::known::Changed;
    pub use riopipe_session::initiator::manager::UnreachableCause;
    pub use riopipe_session::initiator::opening::OpeningError;
    pub use riopipe_session::initiator::queue_pair::SessionError;
    pub use riopipe_session::initiator::volume::creation::foreign_content::ForeignContent;
    pub use riopipe_session::initiator::volume::error::{Nonsense, VolumeOptionsError};
    pub use riopipe_session::label::{AssembleError, LabelError};
}

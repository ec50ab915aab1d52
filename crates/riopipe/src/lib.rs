//! Ordered volumes over NVMe-oF: a write goes after another without anyone waiting.
//!
//! A [`Volume`] spans drives on one or several targets. A [`Stream`] of it takes *groups* of
//! writes: groups are ordered, the writes inside one are not. After a crash the volume holds, for
//! each stream, every group up to some point and no fresh block of a later one.
//!
//! ```no_run
//! use riopipe::{OpenOptions, Place, StreamOptions, Until, Volume};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let members = ["10.0.0.1:4420".parse()?, "10.0.0.2:4420".parse()?];
//! let (volume, recovery) = Volume::open("logs", &members, &OpenOptions::default())?;
//! println!("{recovery}"); // what a crash has left, or that there was none
//! let mut stream = volume.stream(0, &StreamOptions::default())?;
//!
//! let mut record = stream.buf(4096)?;
//! record[..5].copy_from_slice(b"hello");
//! stream.group().write(0, record, Place::Fresh).tag(1).submit()?; // returns at once
//!
//! let commit = stream.buf(4096)?;
//! let seq = stream.group().write(1, commit, Place::Fresh).tag(2).submit_durable()?;
//! stream.wait(Until::Durable(seq), None)?; // both are safe, in this order
//!
//! stream.close()?;
//! volume.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What happens when things fail
//!
//! - **This process dies.** Its targets keep the volume for it for a while
//!   ([`OpenOptions::wait_for_lease`], [`OpenOptions::take_over`]). Whoever opens it next recovers
//!   it: [`Volume::open`] returns how far each stream reaches and with which tag, what was undone,
//!   and which in-place updates are in doubt. [`Volume::recover`] does the same by hand, or only
//!   looks.
//! - **A target dies or a connection breaks.** Streams wait for it, up to
//!   [`ConnectOptions::loss_timeout`]; when it is back it gets again what it has lost. Then the
//!   streams that need it fail.
//! - **A stream fails.** Every call says why, others go on, and [`Stream::reopen`] undoes what is
//!   beyond its last whole group and brings it back.
//!
//! # A block that is written again as it fills
//!
//! The last block of a log gets one more record, and is written again. What it held may still be
//! needed, so it is not [`Place::Fresh`]. But the new content has all of the old one, so either
//! serves: [`Place::Extend`] says so. After a crash the block is not zeroed, and nothing waits to be
//! acknowledged. It may show records beyond the last group that counts; each record has a number,
//! and the recovered tag tells which of them count.
//!
//! ```no_run
//! # use riopipe::{Place, Stream};
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! const RECORD: usize = 64;
//! const RECORDS: usize = 4096 / RECORD;
//!
//! /// The last block of a log. Each record has its number and a checksum; each group has the
//! /// number of its last record as its tag.
//! struct Tail {
//!     block: [u8; 4096],
//! }
//!
//! impl Tail {
//!     /// After recovery: takes out what is beyond record `last`, the recovered tag. The first group
//!     /// does that, before the numbers are given again.
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
//! The example `extend_the_tail` is a whole program. `docs/ordering-contract.md` says what exactly the
//! caller declares (T11).
//!
//! # What it is doing
//!
//! [`Volume::stat`] tells how far each stream is and where the time of the groups goes;
//! [`Volume::stat_source`] has the same as text for Prometheus and as JSON, for the program's own HTTP
//! server. Neither keeps a stream waiting.
//!
//! # Threads
//!
//! A stream belongs to one thread at a time, which builds, sends and reaps in its own calls: there
//! is no lock and no other thread on the way of a write, only a flag that says who has the stream.
//! While its owner is elsewhere, one background thread for each volume takes the stream over: at once
//! if other threads watch it, and otherwise after a while ([`Stream`] says when bytes leave). One
//! thread for each target keeps the connection to it alive and makes new ones.
//!
//! A [`Watch`] is for other threads and for async code: it blocks, or is a future, until a group is
//! complete or durable. A [`StreamWaker`] interrupts the owner's [wait](Stream::wait), and
//! [`Stream::event_fd`] is for event loops. The example `group_commit` shows many threads that
//! append and one that commits.

mod addr;
mod association;
mod background;
mod call_error;
mod create;
mod create_error;
mod error;
mod failure;
mod group;
mod identity;
mod info;
mod open;
mod owner_call;
mod piece;
mod reader;
mod reading;
mod recover;
mod recovery;
mod shared;
mod sockets;
mod start;
mod stat;
mod stream;
mod stream_shell;
mod sync;
mod target;
pub mod undone;
mod volume;
mod waking;
mod watch;
mod watched;

pub use addr::{MemberAddr, ParseMemberError, TargetAddr};
pub use association::discover;
pub use create::CreateOptions;
pub use error::{
    AcknowledgeError, AttachError, Bound, BufError, CallError, CloseError, CreateError,
    EngineHindrance, NotClosed, OpenError, ReadError, RecoverError, ReopenError, StreamError,
    StreamNotClosed, StreamOptionsError, SubmitError, SubmitErrorKind, UnreachableReason,
    WaitError,
};
pub use failure::{Absence, Exhausted, FailureCause, StreamFailure};
pub use group::Group;
pub use identity::ConnectOptions;
pub use info::{MemberInfo, VolumeInfo};
pub use piece::Buf;
pub use reader::{Reader, ReaderOptions};
pub use reading::ReadExtent;
pub use recovery::{BlockRange, InPlaceRange, Recovery, Steps, StreamRecovery};
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
pub use stream::{Stream, StreamOptions};
pub use volume::{OpenOptions, RecoverOptions, RecoverProgress, Volume};
pub use waking::{StreamFd, StreamWaker};
pub use watch::{MarkWait, Watch};

/// What errors are made of: causes that come from the layers below, to be matched on.
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
    pub use riopipe_session::initiator::volume::error::{Nonsense, VolumeOptionsError};
    pub use riopipe_session::label::{AssembleError, LabelError};
}

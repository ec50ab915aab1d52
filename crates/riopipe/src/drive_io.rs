//! A target's drives outside of streams: labels, read and written one at a time, and recovery.

use std::sync::Arc;

use riopipe_nvme::command::{Cqe, Sqe};
use riopipe_session::initiator::association::ControlQueue;
use riopipe_session::label::{DATA_START, LABEL_LEN, Label, LabelError};
use riopipe_session::label_work::LabelIo;

use crate::error::{AttachError, CallError};
use crate::piece::Buf;
use crate::target::{CallData, Target};

/// A connection to a target's drives; closed when it is dropped.
#[derive(Debug)]
pub(crate) struct Drives(Arc<Target>);

impl Drives {
    pub(crate) fn open(target: &Arc<Target>) -> Result<Self, AttachError> {
        target.open_drives()?;
        Ok(Self(Arc::clone(target)))
    }

    /// Asks one command that has to succeed.
    pub(crate) fn call(&self, sqe: Sqe, data: CallData<'_>) -> Result<(Cqe, Vec<u8>), CallError> {
        self.0.call(ControlQueue::Drives, sqe, data)
    }
}

impl Drop for Drives {
    fn drop(&mut self) {
        self.0.close_drives();
    }
}

/// The label in the first two blocks.
pub(crate) fn read_label(
    drives: &Drives,
    nsid: u32,
) -> Result<Result<Label, LabelError>, CallError> {
    let len = 2 * LABEL_LEN;
    let (_, page) = drives.call(Sqe::read(nsid, 0, 2), CallData::Read(len as u32))?;
    let (a, b) = page.split_at(LABEL_LEN);
    Ok(Label::newest([a, b], crate::crc32c))
}

/// Makes the first blocks of the data area read as zeroes, so that what an earlier volume kept
/// there is not taken for the new one's.
pub(crate) fn blank_data(drives: &Drives, nsid: u32) -> Result<(), CallError> {
    let buf = Buf::zeroed(LABEL_LEN);
    drives.call(Sqe::write(nsid, DATA_START, 1), CallData::Buf(buf))?;
    drives.call(Sqe::flush(nsid), CallData::None)?;
    Ok(())
}

/// One step of rewriting a label; what it read.
pub(crate) fn label_io(drives: &Drives, nsid: u32, io: &LabelIo) -> Result<Vec<u8>, CallError> {
    match io {
        LabelIo::Read { .. } => {
            let len = 2 * LABEL_LEN as u32;
            Ok(drives.call(Sqe::read(nsid, 0, 2), CallData::Read(len))?.1)
        }
        LabelIo::Flush { .. } => drives.call(Sqe::flush(nsid), CallData::None).map(|_| Vec::new()),
        LabelIo::Write { lba, block, .. } => {
            let mut buf = Buf::zeroed(LABEL_LEN);
            buf.copy_from_slice(block);
            drives.call(Sqe::write(nsid, *lba, 1), CallData::Buf(buf)).map(|_| Vec::new())
        }
    }
}

/// Writes a label to its block and makes it durable.
pub(crate) fn write_label(drives: &Drives, nsid: u32, label: &Label) -> Result<(), CallError> {
    let mut buf = Buf::zeroed(LABEL_LEN);
    buf.copy_from_slice(&label.encode(crate::crc32c));
    let lba = Label::block_of(label.sequence);
    drives.call(Sqe::write(nsid, lba, 1), CallData::Buf(buf))?;
    drives.call(Sqe::flush(nsid), CallData::None)?;
    Ok(())
}

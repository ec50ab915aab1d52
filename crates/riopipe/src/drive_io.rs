//! A target's drives outside of streams: labels, read and written one at a time, and recovery.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_nvme::command::Sqe;
use riopipe_session::initiator::opening::IO_COMMANDS_MAX;
use riopipe_session::label::{DATA_START, LABEL_LEN, Label, LabelError};
use riopipe_session::label_work::LabelIo;

use crate::association::{Association, CallData, Caller, open_socket};
use crate::error::{AttachError, CallError};
use crate::identity::ConnectOptions;
use crate::piece::Buf;
use crate::shared::is_passing;
use crate::stream::nanos;

/// The queue that labels and recovery go over; streams have the others.
pub(crate) const DRIVES_QUEUE: u16 = 1;

/// A connection to a target's drives.
#[derive(Debug)]
pub(crate) struct Drives(Caller);

impl Drives {
    pub(crate) fn open(
        target: &Association,
        options: &ConnectOptions,
    ) -> Result<Self, AttachError> {
        let deadline = now_ns().saturating_add(nanos(options.timeout));
        loop {
            let socket = open_socket(&target.addr, options)?;
            let queue = target.io_queue(DRIVES_QUEUE, IO_COMMANDS_MAX + 1);
            match Caller::open(socket, queue, options.timeout) {
                Ok(caller) => return Ok(Self(caller)),
                // The last use of the queue has not been seen to end.
                Err(error) => match target.blame(error) {
                    error if is_passing(&error) && now_ns() < deadline => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    source => {
                        let (target, nqn) = (target.name(), target.addr.nqn.clone());
                        return Err(AttachError::Target { target, nqn, source });
                    }
                },
            }
        }
    }

    pub(crate) fn queue(&mut self) -> &mut Caller {
        &mut self.0
    }
}

/// The label in the first two blocks.
pub(crate) fn read_label(
    drives: &mut Caller,
    nsid: u32,
) -> Result<Result<Label, LabelError>, CallError> {
    let len = 2 * LABEL_LEN;
    let (_, page) = drives.call(Sqe::read(nsid, 0, 2), CallData::Read(len as u32))?;
    let (a, b) = page.split_at(LABEL_LEN);
    Ok(Label::newest([a, b], crate::crc32c))
}

/// Makes the first blocks of the data area read as zeroes, so that what an earlier volume kept
/// there is not taken for the new one's.
pub(crate) fn blank_data(drives: &mut Caller, nsid: u32) -> Result<(), CallError> {
    let buf = Buf::zeroed(LABEL_LEN);
    drives.call(Sqe::write(nsid, DATA_START, 1), CallData::Buf(buf))?;
    drives.call(Sqe::flush(nsid), CallData::None)?;
    Ok(())
}

/// One step of rewriting a label; what it read.
pub(crate) fn label_io(drives: &mut Caller, nsid: u32, io: &LabelIo) -> Result<Vec<u8>, CallError> {
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
pub(crate) fn write_label(drives: &mut Caller, nsid: u32, label: &Label) -> Result<(), CallError> {
    let mut buf = Buf::zeroed(LABEL_LEN);
    buf.copy_from_slice(&label.encode(crate::crc32c));
    let lba = Label::block_of(label.sequence);
    drives.call(Sqe::write(nsid, lba, 1), CallData::Buf(buf))?;
    drives.call(Sqe::flush(nsid), CallData::None)?;
    Ok(())
}

//! Recovery of a volume's streams, as opening, reopening and acknowledging need it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use riopipe_nvme::command::Sqe;
use riopipe_order::attribute::{StreamId, VolumeId};
use riopipe_order::topology::{Extent, Topology};
use riopipe_session::initiator::manager::Absence;
use riopipe_session::initiator::opening::{Mode, Opening, OpeningError, Phase};

use crate::BLOCK_BYTES;
use crate::assemble::at_once;
use crate::drive_io::Drives;
use crate::errand::{Errand, ErrandError, Lines};
use crate::error::{AcknowledgeError, RecoverError};
use crate::recovery::{BlockRange, Steps, StreamRecovery, streams_of, volume_ranges};
use crate::shared::{Inner, lock};
use crate::target::CallData;
use crate::undone::{SaveError, SavedExtent, Saving};

/// Blocks of one read while saving.
const SAVE_BLOCKS: u32 = 32;

impl RecoverError {
    /// A target is away, or will not come back.
    pub(crate) fn absent(target: &str, absence: Absence) -> Self {
        let (target, why) = (target.into(), absence.why);
        if absence.for_good { Self::Lost { target, why } } else { Self::Away { target, why } }
    }

    pub(crate) fn of(volume: &str, error: ErrandError, name: impl Fn(usize) -> String) -> Self {
        match error {
            ErrandError::Call { target, doing, source } => Self::Call { target, doing, source },
            ErrandError::Opening(error) => {
                let target = error.server().map(name);
                Self::Opening { volume: volume.into(), target, error }
            }
        }
    }
}

impl Inner {
    /// Finds the prefix of one stream, whose connections are closed, and undoes what is beyond.
    pub(crate) fn recover_stream(&self, stream: StreamId) -> Result<StreamRecovery, RecoverError> {
        let mode = Mode::Reopen { generation: self.generation, streams: vec![stream] };
        let (mut found, steps) = self.errand(mode)?;
        // One was asked for.
        let found = found.pop().unwrap_or_else(|| StreamRecovery::none(stream, Default::default()));
        tracing::info!(volume = %self.name, recovery = %found, %steps, "an ordered stream was recovered");
        Ok(found)
    }

    /// Drops the list of in-place updates of a stream: the caller has seen it.
    pub(crate) fn acknowledge_stream(&self, stream: StreamId) -> Result<(), AcknowledgeError> {
        if !lock(&self.streams).pending.contains_key(&stream) {
            return Err(AcknowledgeError::NotPending { stream });
        }
        let mode = Mode::Acknowledge { generation: self.generation, streams: vec![stream] };
        match self.errand(mode) {
            Ok(_) => {}
            // It has been acknowledged, and the answer was lost.
            Err(RecoverError::Opening { error: OpeningError::NotPending { .. }, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        lock(&self.streams).pending.remove(&stream);
        Ok(())
    }

    fn errand(&self, mode: Mode) -> Result<(Vec<StreamRecovery>, Steps), RecoverError> {
        let mut attempt = lock(&self.recovering);
        for server in &self.servers {
            if let Some(absence) = server.target.absence() {
                return Err(RecoverError::absent(&server.name, absence));
            }
        }
        let drives = at_once(&self.servers, |server| Drives::open(&server.target))?;
        let lines = self.servers.iter().zip(&drives);
        let lines = lines
            .map(|(server, drives)| Lines { target: Arc::clone(&server.target), drives })
            .collect();
        let fault = |error| RecoverError::of(&self.name, error, |at| self.server_name(at));
        // What an attempt before this one was answered late is not this one's answer (T23).
        *attempt = attempt.wrapping_add(1);
        let opening = Opening::new(self.opening.clone(), mode, *attempt)
            .map_err(|error| fault(ErrandError::Opening(error)))?;
        let mut errand = Errand::new(opening, lines, self.connect.timeout);
        while errand.run(&mut |_| ()).map_err(fault)? != Phase::Over {
            errand.go_on().map_err(fault)?;
        }
        Ok((streams_of(errand.opening.outcome(), &self.topology), errand.steps))
    }
}

/// Keeps what an errand is about to zero in a file; `None` if there is nothing.
pub(crate) fn save_undone(
    errand: &mut Errand<'_>,
    volume: VolumeId,
    topology: &Topology,
    nsids: &[u32],
    path: &Path,
) -> Result<Option<PathBuf>, SaveError> {
    let mut extents = Vec::new();
    for stream in &errand.opening.outcome().streams {
        let stream = &stream.plan;
        let ranges = volume_ranges(topology, &stream.undo);
        extents
            .extend(ranges.into_iter().map(|range| SavedExtent { stream: stream.stream, range }));
    }
    if extents.is_empty() {
        return Ok(None);
    }
    let mut saving = Saving::begin(path, volume, &extents)?;
    for SavedExtent { range: BlockRange { lba, blocks }, .. } in extents {
        let (mut at, end) = (lba, lba + blocks);
        while at < end {
            let count = (end - at).min(SAVE_BLOCKS.into()) as u32;
            let bytes = match read_blocks(errand, topology, nsids, at, count) {
                Ok(bytes) => bytes,
                Err(error) => {
                    saving.discard();
                    return Err(error);
                }
            };
            saving = saving.append(&bytes)?;
            at += u64::from(count);
        }
    }
    saving.finish().map(Some)
}

/// Reads volume blocks, one command after the other.
fn read_blocks(
    errand: &mut Errand<'_>,
    topology: &Topology,
    nsids: &[u32],
    lba: u64,
    blocks: u32,
) -> Result<Vec<u8>, SaveError> {
    let mut bytes = vec![0; blocks as usize * BLOCK_BYTES];
    let mut extents: Vec<Extent> = Vec::new();
    topology.map(lba, blocks, |extent| extents.push(extent));
    for extent in extents {
        let server = topology.member(extent.member).server;
        let read = Sqe::read(nsids[usize::from(extent.member.0)], extent.lba, extent.blocks);
        let at = extent.offset as usize * BLOCK_BYTES;
        let part = &mut bytes[at..at + extent.blocks as usize * BLOCK_BYTES];
        let (target, drives) = errand.drives(usize::from(server));
        let (_, page) = drives
            .call(read, CallData::Read(part.len() as u32))
            .map_err(|source| SaveError::Read { target: target.into(), source })?;
        part.copy_from_slice(&page);
    }
    Ok(bytes)
}

//! What a target's sessions see of their machine: drives, the log, the clock.

use std::collections::VecDeque;

use riopipe_session::target::{
    ConnId, DeviceError, Event, Host, OpId, Shared, Submitted, WriteData,
};

use crate::drive::{Ask, Drive, End, Told};
use crate::fuse::Fuse;
use crate::log_store::LogPart;
use crate::rng::Rng;

/// A drive's operation that ends later.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled {
    /// In so many ns.
    pub delay: u64,
    /// The drive.
    pub drive: usize,
    /// The operation.
    pub flight: u64,
}

/// The [`Host`] of one target's sessions.
pub struct SimHost {
    /// The time, ns.
    pub now: u64,
    /// What the connections share; nothing while no process runs.
    pub shared: Option<Shared<LogPart>>,
    /// The machine's drives.
    pub drives: Vec<Drive>,
    /// Connections to look at their notices.
    pub notices: VecDeque<ConnId>,
    /// Operations begun since last looked at.
    pub scheduled: Vec<Scheduled>,
    /// What the drives have told, with the drive.
    pub told: Vec<(usize, Told)>,
    /// What the sessions have to say, if somebody listens.
    pub log: Option<Vec<String>>,
    /// Stops the process in the middle of something.
    pub fuse: Fuse,
    rng: Rng,
}

impl SimHost {
    /// The host of a machine with these drives.
    #[must_use]
    pub fn new(drives: Vec<Drive>, fuse: Fuse, rng: Rng, traced: bool) -> Self {
        Self {
            now: 0,
            shared: None,
            drives,
            notices: VecDeque::new(),
            scheduled: Vec::new(),
            told: Vec::new(),
            log: traced.then(Vec::new),
            fuse,
            rng,
        }
    }

    fn begin(&mut self, ns: usize, op: OpId, ask: Ask) -> Submitted<Vec<u8>> {
        if !self.fuse.burn() {
            // The process has stopped before; nobody will hear of it.
            return Submitted::Pending;
        }
        let said = self.log.is_some().then(|| format!("{ask:?}"));
        let flight = self.drives[ns].begin(op, ask, &mut self.rng);
        if let (Some(log), Some(said)) = (&mut self.log, said) {
            log.push(format!("drive {ns}: begins {flight}: {said}"));
        }
        let spec = *self.drives[ns].spec();
        if self.rng.percent(u64::from(spec.at_once)) {
            let end = self.end(ns, flight);
            return Submitted::Done(end.map_or(Err(DeviceError::PowerLost), |(_, end)| end));
        }
        let times = if self.rng.percent(u64::from(spec.slow)) { self.rng.range(1, 100) } else { 1 };
        let delay = 1_000 + times * self.rng.below(1_000 * u64::from(spec.latency_us));
        self.scheduled.push(Scheduled { delay, drive: ns, flight });
        Submitted::Pending
    }

    /// Ends a drive's operation: whom to tell, and what.
    #[allow(clippy::type_complexity, reason = "the shape that `device_done` takes")]
    pub fn end(
        &mut self,
        drive: usize,
        flight: u64,
    ) -> Option<(Option<OpId>, Result<Option<Vec<u8>>, DeviceError>)> {
        let (op, end) = self.drives[drive].finish(flight, &mut self.rng)?;
        if let Some(log) = &mut self.log {
            log.push(format!("drive {drive}: ends {flight}: {end:?}"));
        }
        let told = self.drives[drive].take_told();
        self.told.extend(told.into_iter().map(|told| (drive, told)));
        let result = match end {
            End::Ok(read) => Ok(read.map(|contents| self.drives[drive].bytes(&contents))),
            End::Failed => Err(DeviceError::Failed),
            End::Full => Err(DeviceError::NoSpace),
        };
        Some((op, result))
    }

    /// The power of this machine's drives is cut.
    pub fn power_cut(&mut self) {
        for drive in &mut self.drives {
            drive.power_cut(&mut self.rng);
        }
    }
}

impl Host for SimHost {
    type Buf = Vec<u8>;
    type Region = LogPart;

    fn now(&self) -> u64 {
        self.now
    }

    fn alloc(&mut self, len: usize) -> Option<Vec<u8>> {
        Some(vec![0; len])
    }

    fn write(
        &mut self,
        ns: usize,
        op: OpId,
        lba: u64,
        data: WriteData<'_, Vec<u8>>,
    ) -> Submitted<Vec<u8>> {
        let contents = match &data {
            WriteData::Borrowed(bytes) => self.drives[ns].names(lba, bytes),
            WriteData::Owned(bytes) => self.drives[ns].names(lba, bytes),
        };
        self.begin(ns, op, Ask::Write(lba as u32, contents))
    }

    fn read(&mut self, ns: usize, op: OpId, lba: u64, blocks: u32) -> Submitted<Vec<u8>> {
        self.begin(ns, op, Ask::Read(lba as u32, blocks))
    }

    fn flush(&mut self, ns: usize, op: OpId) -> Submitted<Vec<u8>> {
        self.begin(ns, op, Ask::Flush(0))
    }

    fn zero(
        &mut self,
        ns: usize,
        op: OpId,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> Submitted<Vec<u8>> {
        self.begin(ns, op, Ask::Zero(lba as u32, blocks as u32, deallocate))
    }

    fn with_shared<T>(&mut self, f: impl FnOnce(&mut Shared<LogPart>) -> T) -> T {
        f(self.shared.as_mut().expect("sessions run only while their process does"))
    }

    fn notify(&mut self, conn: ConnId) {
        self.notices.push_back(conn);
    }

    fn log(&mut self, event: Event<'_>) {
        if let Some(log) = &mut self.log {
            log.push(format!("{event:?}"));
        }
    }
}

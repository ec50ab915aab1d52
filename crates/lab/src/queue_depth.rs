//! The number of commands at a drive, over time.
//!
//! [`WatchedDrive`] stands in front of a drive. A command is at the drive from its submission until the
//! target takes its completion.

use std::{
    os::fd::RawFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use riopipe_media::{
    AlignedBuf, BlockDevice, Data, Done, Drive, Geometry, OpenError, Queue, Submitted,
    ssd::PowerCut, survival::Survival,
};
use riopipe_order::write_order::{DriveOrder, EpochId, WriteOrder};
use riopipe_platform::now_ns;

/// The largest number of steps that are recorded.
const STEPS_MAX: usize = 1 << 20;

/// The number of commands at a drive. Any thread may read it.
#[derive(Debug, Default)]
pub struct DepthWatch(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    depth: u64,
    /// The time of the last change, ns.
    changed_ns: u64,
    /// The sum of depth times time.
    area: u128,
    largest: u64,
    /// While steps are recorded: the time of each change, and the number from then on.
    steps: Option<Vec<DepthStep>>,
}

/// A change of the number of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DepthStep {
    /// Its time, ns.
    pub at_ns: u64,
    /// The number from then on.
    pub depth: u64,
}

/// The number of commands up to some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DepthReading {
    at_ns: u64,
    area: u128,
    largest: u64,
}

impl DepthReading {
    /// The mean number since an earlier reading.
    #[must_use]
    pub fn mean_since(&self, before: &Self) -> f64 {
        let ns = self.at_ns.saturating_sub(before.at_ns).max(1);
        self.area.saturating_sub(before.area) as f64 / ns as f64
    }

    /// The largest number since the reading before.
    #[must_use]
    pub const fn largest(&self) -> u64 {
        self.largest
    }
}

impl DepthWatch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(u64) -> u64) {
        let mut state = self.lock();
        let now = now_ns();
        state.advance(now);
        state.depth = change(state.depth);
        state.largest = state.largest.max(state.depth);
        let depth = state.depth;
        if let Some(steps) = state.steps.as_mut().filter(|steps| steps.len() < STEPS_MAX) {
            steps.push(DepthStep { at_ns: now, depth });
        }
    }

    /// The number so far. The largest one is counted anew from here on.
    #[must_use]
    pub fn read(&self) -> DepthReading {
        let mut state = self.lock();
        state.advance(now_ns());
        let reading =
            DepthReading { at_ns: state.changed_ns, area: state.area, largest: state.largest };
        state.largest = state.depth;
        reading
    }

    /// Begins to record the changes.
    pub fn record(&self) {
        self.lock().steps = Some(Vec::new());
    }

    /// The changes that were recorded. The recording ends.
    #[must_use]
    pub fn recorded(&self) -> Vec<DepthStep> {
        self.lock().steps.take().unwrap_or_default()
    }
}

impl State {
    fn advance(&mut self, now: u64) {
        let since = now.saturating_sub(self.changed_ns);
        self.area += u128::from(self.depth) * u128::from(since);
        self.changed_ns = now;
    }
}

/// The numbers at `count` moments with the same distance, from `from_ns` on: 0 before the first step.
#[must_use]
pub fn depths_at(steps: &[DepthStep], from_ns: u64, every_ns: u64, count: usize) -> Vec<u64> {
    let depth = |moment: usize| {
        let at = from_ns + every_ns * moment as u64;
        let before = steps.partition_point(|step| step.at_ns <= at);
        before.checked_sub(1).map_or(0, |last| steps[last].depth)
    };
    (0..count).map(depth).collect()
}

/// The mean number from the first step to the last one; 0 without time between them.
#[must_use]
pub fn mean_depth(steps: &[DepthStep]) -> f64 {
    let area = |pair: &[DepthStep]| pair[0].depth * (pair[1].at_ns - pair[0].at_ns);
    let areas: u64 = steps.windows(2).map(area).sum();
    match (steps.first(), steps.last()) {
        (Some(first), Some(last)) if last.at_ns > first.at_ns => {
            areas as f64 / (last.at_ns - first.at_ns) as f64
        }
        _ => 0.0,
    }
}

/// A drive whose commands are counted.
pub struct WatchedDrive {
    drive: Arc<dyn Drive>,
    watch: Arc<DepthWatch>,
}

impl WatchedDrive {
    /// The drive, and the number of its commands.
    #[must_use]
    pub fn around(drive: Arc<dyn Drive>) -> (Arc<dyn Drive>, Arc<DepthWatch>) {
        let watch = Arc::new(DepthWatch::default());
        (Arc::new(Self { drive, watch: Arc::clone(&watch) }), watch)
    }

    fn watched(&self, queue: Box<dyn Queue>) -> Box<dyn Queue> {
        Box::new(WatchedQueue { queue, watch: Arc::clone(&self.watch) })
    }
}

impl Drive for WatchedDrive {
    fn geometry(&self) -> &Geometry {
        self.drive.geometry()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        Ok(self.watched(self.drive.open_queue(depth)?))
    }

    fn open_only_queue(&self, depth: usize) -> Result<Box<dyn Queue>, OpenError> {
        Ok(self.watched(self.drive.open_only_queue(depth)?))
    }

    fn order(&self) -> DriveOrder {
        self.drive.order()
    }

    fn survives(&self) -> Survival {
        self.drive.survives()
    }

    fn power_cut(&self, seed: u64) -> Option<PowerCut> {
        self.drive.power_cut(seed)
    }

    fn power_on(&self) {
        self.drive.power_on();
    }
}

struct WatchedQueue {
    queue: Box<dyn Queue>,
    watch: Arc<DepthWatch>,
}

impl WatchedQueue {
    fn submitted(&self, submitted: Submitted) -> Submitted {
        if matches!(submitted, Submitted::Pending) {
            self.watch.change(|depth| depth + 1);
        }
        submitted
    }
}

impl BlockDevice for WatchedQueue {
    type Buf = AlignedBuf;

    fn write(&mut self, op: u64, lba: u64, data: Data<'_>) -> Submitted {
        let submitted = self.queue.write(op, lba, data);
        self.submitted(submitted)
    }

    fn write_in_order(
        &mut self,
        op: u64,
        lba: u64,
        data: Data<'_>,
        order: WriteOrder,
    ) -> Submitted {
        let submitted = self.queue.write_in_order(op, lba, data, order);
        self.submitted(submitted)
    }

    fn flush_epochs(&mut self, op: u64, before: EpochId) -> Submitted {
        let submitted = self.queue.flush_epochs(op, before);
        self.submitted(submitted)
    }

    fn start_stream(&mut self, op: u64, first: EpochId) -> Submitted {
        let submitted = self.queue.start_stream(op, first);
        self.submitted(submitted)
    }

    fn read(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        let submitted = self.queue.read(op, lba, blocks);
        self.submitted(submitted)
    }

    fn flush(&mut self, op: u64) -> Submitted {
        let submitted = self.queue.flush(op);
        self.submitted(submitted)
    }

    fn write_zeroes(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        let submitted = self.queue.write_zeroes(op, lba, blocks);
        self.submitted(submitted)
    }

    fn deallocate(&mut self, op: u64, lba: u64, blocks: u64) -> Submitted {
        let submitted = self.queue.deallocate(op, lba, blocks);
        self.submitted(submitted)
    }

    fn kick(&mut self, now: u64) {
        self.queue.kick(now);
    }

    fn poll(&mut self, now: u64, done: &mut Vec<Done>) {
        let before = done.len();
        self.queue.poll(now, done);
        let completed = (done.len() - before) as u64;
        if completed > 0 {
            self.watch.change(|depth| depth.saturating_sub(completed));
        }
    }

    fn next_deadline(&self) -> Option<u64> {
        self.queue.next_deadline()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }
}

impl Queue for WatchedQueue {
    fn event_fd(&self) -> Option<RawFd> {
        self.queue.event_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_counted_until_their_completion_is_taken() {
        let drive = riopipe_media::open_drive("ssd:optane,size=1M").unwrap();
        let (drive, watch) = WatchedDrive::around(drive);
        let mut queue = drive.open_queue(8).unwrap();
        let begin = watch.read();
        watch.record();
        for op in 0..3 {
            let _ = queue.write(op, op, Data::Borrowed(&[1; 4096]));
        }
        let now = now_ns();
        queue.kick(now);
        let mut done = Vec::new();
        // Long after the modelled times: no sleep is needed.
        queue.poll(now + 1_000_000_000, &mut done);
        assert_eq!(done.len(), 3);
        let end = watch.read();
        assert_eq!(end.largest(), 3);
        assert!(end.mean_since(&begin) > 0.0 && end.mean_since(&begin) <= 3.0);
        let depths: Vec<u64> = watch.recorded().iter().map(|step| step.depth).collect();
        assert_eq!(depths, [1, 2, 3, 0]);
        assert_eq!(watch.read().largest(), 0, "it is counted anew");
    }

    #[test]
    fn a_mean_is_over_time() {
        let reading = |at_ns, area| DepthReading { at_ns, area, largest: 0 };
        assert_eq!(reading(300, 500).mean_since(&reading(100, 100)), 2.0);
        assert_eq!(reading(100, 0).mean_since(&reading(100, 0)), 0.0);
    }

    #[test]
    fn depths_are_those_of_the_last_step() {
        let step = |at_ns, depth| DepthStep { at_ns, depth };
        let steps = [step(10, 1), step(20, 2), step(20, 3), step(45, 0)];
        assert_eq!(depths_at(&steps, 0, 10, 6), [0, 1, 3, 3, 3, 0]);
        assert_eq!(mean_depth(&steps), (10.0 + 25.0 * 3.0) / 35.0);
        assert_eq!(mean_depth(&steps[..1]), 0.0);
    }
}

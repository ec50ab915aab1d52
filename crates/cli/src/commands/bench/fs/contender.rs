//! The contenders, and a run of one.

use std::{io, path::PathBuf, sync::Arc};

use riopipe::ConnectOptions;
use riopipe_fs::{
    JournalMode,
    fsync_stages::{FsyncTimesSnapshot, FsyncTrace},
    fuse::{Ticker, now},
};
use riopipe_lab::{
    fs_load::{Files, FsLoad, append_fsync, fillsync, varmail},
    harness::SideCpu,
    sample::Sample,
};

use super::{
    calls::Calls,
    cpu::side_cpu,
    db_bench, floor,
    fresh::{DriveCounts, Fresh, open},
    kernel::KernelExt4,
    mounted::Mounted,
};
use crate::{
    args::bench::fs::{Through, Workload},
    failure::{Code, Failure},
    own_targets::OwnTargets,
};

/// A contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// RioFS, which waits as ext4 does.
    Ext4,
    /// RioFS on streams of engine `horae`.
    Horae,
    /// RioFS, which leaves the order of its commits to the drive.
    Barrier,
    /// The same, with data on streams of its own, which the journal's stream follows.
    Opimq,
    /// RioFS.
    Rio,
    /// Two groups and one wait, without a file system.
    Floor,
    /// The kernel's ext4 on a loop device.
    KernelExt4,
}

impl Contender {
    /// Its name in the result.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Horae => "horae",
            Self::Barrier => "barrier",
            Self::Opimq => "opimq",
            Self::Rio => "rio",
            Self::Floor => "floor",
            Self::KernelExt4 => "kernel_ext4",
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) sample: Sample,
    /// The calls of `fsync` on RioFS, also those of the warm-up.
    pub(super) fsyncs: FsyncTimesSnapshot,
    /// Some of them, step by step.
    pub(super) traces: Vec<FsyncTrace>,
    /// The commands that the drive got meanwhile.
    pub(super) drive: Option<DriveCounts>,
    /// The operations of the floor meanwhile.
    pub(super) floor_ops: u64,
}

/// A target with its volume, and the way to use it.
pub(super) struct Place {
    /// The target of all contenders but `barrier` and `opimq`.
    pub(super) plain: OwnTargets,
    /// A target whose drive has a cache barrier; `None`: the drive is not a modelled one.
    pub(super) barrier: Option<OwnTargets>,
    /// A target whose drive keeps the order of epochs; `None`: as above.
    pub(super) epochs: Option<OwnTargets>,
    pub(super) connect: ConnectOptions,
    pub(super) through: Through,
    /// RocksDB's own program, if it makes the load.
    pub(super) db_bench: Option<PathBuf>,
}

impl Place {
    /// Runs one contender, on a new file system.
    pub(super) fn run(
        &self,
        contender: Contender,
        workload: Workload,
        load: &FsLoad,
    ) -> Result<Run, Failure> {
        match contender {
            Contender::Ext4 => self.run_fs(JournalMode::Ext4, workload, load),
            Contender::Horae => self.run_fs(JournalMode::Horae, workload, load),
            Contender::Barrier => self.run_fs(JournalMode::Barrier, workload, load),
            Contender::Opimq => self.run_fs(JournalMode::Opimq, workload, load),
            Contender::Rio => self.run_fs(JournalMode::Rio, workload, load),
            Contender::Floor => self.run_floor(load),
            Contender::KernelExt4 => {
                let kernel =
                    KernelExt4::mount().map_err(|text| Failure::new(Code::Failed, text))?;
                let files = kernel.files()?;
                let sample = match self.db_bench_of(workload) {
                    Some(program) => db_bench::run(program, files.directory(), load),
                    // The threads of the kernel are not ours, so the workers are all that is known.
                    None => run_load(workload, &files, load, SideCpu::default),
                };
                drop(files);
                let sample = sample?;
                kernel.unmount()?;
                Ok(Run { sample, ..Run::default() })
            }
        }
    }

    fn db_bench_of(&self, workload: Workload) -> Option<&PathBuf> {
        self.db_bench.as_ref().filter(|_| workload == Workload::RocksdbFillsync)
    }

    /// The target on which a mode runs.
    fn own(&self, mode: JournalMode) -> &OwnTargets {
        let ordered = match mode {
            JournalMode::Barrier => self.barrier.as_ref(),
            JournalMode::Opimq => self.epochs.as_ref(),
            JournalMode::Ext4 | JournalMode::Horae | JournalMode::Rio => None,
        };
        ordered.unwrap_or(&self.plain)
    }

    fn run_floor(&self, load: &FsLoad) -> Result<Run, Failure> {
        let volume = open(&self.plain, &self.connect, None)?;
        let before = DriveCounts::of(&self.plain);
        let result = floor::run(&volume, load);
        let drive = Some(DriveCounts::of(&self.plain).since(before));
        let closed = volume.close().map_err(|error| Failure::storage(&error));
        let (sample, floor_ops) = result?;
        closed?;
        Ok(Run { sample, drive, floor_ops, ..Run::default() })
    }

    fn run_fs(&self, mode: JournalMode, workload: Workload, load: &FsLoad) -> Result<Run, Failure> {
        let own = self.own(mode);
        let fresh = Fresh::make(own, &self.connect, mode)?;
        let fs = Arc::clone(fresh.fs());
        let (fsyncs, drive) = (fresh.fsyncs(), DriveCounts::of(own));
        let ended = || (fresh.fsyncs().since(&fsyncs), Some(DriveCounts::of(own).since(drive)));
        let run = match self.through {
            Through::Calls => {
                let ticker =
                    Ticker::start(Arc::clone(&fs)).map_err(|error| Failure::storage(&error))?;
                let files = Calls::new(Arc::clone(&fs));
                let result = run_load(workload, &files, load, side_cpu);
                let (fsyncs, drive) = ended();
                ticker.stop();
                let run = Run {
                    sample: result?,
                    fsyncs,
                    traces: files.into_traces(),
                    drive,
                    floor_ops: 0,
                };
                fs.unmount(now()).map_err(|error| Failure::storage(&error))?;
                run
            }
            Through::Mount => {
                let mounted = Mounted::new(Arc::clone(&fs))?;
                let files = mounted.files()?;
                let result = match self.db_bench_of(workload) {
                    Some(program) => db_bench::run(program, files.directory(), load),
                    None => run_load(workload, &files, load, side_cpu),
                };
                let (fsyncs, drive) = ended();
                drop(files);
                let run = Run { sample: result?, fsyncs, drive, ..Run::default() };
                mounted.unmount()?;
                run
            }
        };
        drop(fs);
        fresh.close()?;
        Ok(run)
    }
}

fn run_load(
    workload: Workload,
    files: &impl Files,
    load: &FsLoad,
    cpu: impl Fn() -> SideCpu,
) -> Result<Sample, Failure> {
    let sample: io::Result<Sample> = match workload {
        Workload::AppendFsync => append_fsync(files, load, cpu),
        Workload::Varmail => varmail(files, load, cpu),
        Workload::RocksdbFillsync => fillsync(files, load, cpu),
    };
    sample.map_err(|error| Failure::storage(&error))
}

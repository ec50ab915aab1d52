//! The memory of an NVMe drive under a `pci:` log: its Persistent Memory Region (PMR).
//!
//! The files of the drive in sysfs map its base address registers (BARs): BAR 0 with its properties,
//! and the BAR with the region. [`riopipe_nvme::pmr`] decides what is to be written and read there.
//!
//! The kernel maps both without a cache: a store of 8 bytes leaves the CPU as one write of 8 bytes,
//! in the order of the program. It does not map them so with the files whose names end in `_wc`.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use riopipe_nvme::pmr::{
    self, Barrier, Capabilities, Device, Enabling, Fault, PMRCTL_ENABLE, PmrError, Step, offset,
};
use riopipe_order::block_device::BLOCK_BYTES;
use riopipe_order::region::RegionError;

use crate::error::OpenError;
use crate::mapping::Mapping;
use crate::medium::{LockWait, Medium};
use crate::pci::PciAddress;

/// Length of the properties in BAR 0 in bytes (Base 2.1 §3.1.4). The doorbells behind them are not
/// mapped.
const PROPERTIES_BYTES: usize = 4096;
/// Interval between two reads of the status of a region that becomes ready.
const READY_PAUSE: Duration = Duration::from_millis(10);
/// Wait for a region to become ready after which a line about it is logged.
const READY_QUIET: Duration = Duration::from_secs(2);

/// The properties of a drive, mapped.
pub(super) struct Properties {
    mapping: Mapping,
    /// The drive's directory in sysfs.
    directory: PathBuf,
    capabilities: Capabilities,
}

/// An enabled region.
pub(super) struct DriveMemory {
    pub(super) properties: Properties,
    /// The region.
    pub(super) mapping: Mapping,
    /// Its file, locked.
    pub(super) medium: Medium,
    /// Whether it has the content of before the last power cycle or reset.
    pub(super) is_restored: bool,
}

impl DriveMemory {
    /// Enables and maps the region of the drive at `address` below `root`, for this process alone.
    pub(super) fn open(
        root: &Path,
        address: &PciAddress,
        lock_wait: LockWait,
    ) -> Result<Self, OpenError> {
        let properties = Properties::open(root, address)?;
        let (path, file) = properties.region_file()?;
        let len = region_len(&path, &file)?;
        let medium = Medium::region(file, &path, len as u64, lock_wait)?;
        let is_restored = properties.enable()?;
        let mapping = Mapping::shared(&medium.file, len, false)
            .map_err(|source| properties.map_error(&path, source))?;
        Ok(Self { properties, mapping, medium, is_restored })
    }
}

/// A region that is only read, without a lock.
pub(super) struct ReadMemory {
    properties: Properties,
    mapping: Mapping,
    pub(super) is_served: bool,
    /// Keeps the file of the region open, which the mapping needs.
    _file: File,
}

impl ReadMemory {
    /// Maps the region for reading only. A region that is not enabled is enabled first, since
    /// nothing can be read from it before.
    pub(super) fn open(root: &Path, address: &PciAddress) -> Result<Self, OpenError> {
        let properties = Properties::open(root, address)?;
        let (path, file) = properties.region_file()?;
        let len = region_len(&path, &file)?;
        let is_served = super::reader::is_locked(&file).map_err(os(&path, "unlock it"))?;
        properties.enable()?;
        let mapping = Mapping::shared(&file, len, false)
            .map_err(|source| properties.map_error(&path, source))?;
        Ok(Self { properties, mapping, is_served, _file: file })
    }

    pub(super) fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Reads whole words at `offset`, which are inside the region.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), OpenError> {
        assert!(offset.is_multiple_of(8) && offset + into.len() <= self.len());
        for (at, word) in (offset..).step_by(8).zip(into.chunks_exact_mut(8)) {
            word.copy_from_slice(&load(&self.mapping, at).to_ne_bytes());
        }
        self.properties.check(&self.mapping).map_err(|fault| self.properties.error(fault.into()))
    }
}

/// Loads the word at `offset` of a mapped region.
fn load(mapping: &Mapping, offset: usize) -> u64 {
    debug_assert!(offset.is_multiple_of(8) && offset + 8 <= mapping.len());
    // SAFETY: the callers ask for aligned words inside the mapping. The load is volatile, so that the
    // compiler makes it a single one of 8 bytes, as devices expect.
    unsafe { mapping.start().wrapping_add(offset).cast::<u64>().read_volatile() }
}

impl Properties {
    /// Maps the properties of the drive at `address`.
    fn open(root: &Path, address: &PciAddress) -> Result<Self, OpenError> {
        let directory = address.directory(root);
        let path = directory.display().to_string();
        let kind = |problem: String| OpenError::Kind { path: path.clone(), problem };
        if cfg!(not(target_arch = "x86_64")) {
            return Err(kind("a log in a drive's memory (pci:) needs an x86-64 machine".into()));
        }
        let class = std::fs::read_to_string(directory.join("class")).map_err(|error| {
            let found = match error.kind() {
                io::ErrorKind::NotFound => "no such PCI device".to_owned(),
                _ => format!("can't read its class: {error}"),
            };
            kind(format!("{found}: `lspci -D -d ::0108` lists the NVMe drives"))
        })?;
        // Base class 01h, subclass 08h, interface 02h: an NVMe I/O controller (PCI Code and ID
        // Assignment Specification).
        if class.trim() != "0x010802" {
            let problem = "not an NVMe drive: `lspci -D -d ::0108` lists them";
            return Err(kind(format!("PCI class {}: {problem}", class.trim())));
        }
        switch_on(&directory)?;
        let path = directory.join("resource0");
        let file = open_bar(&path)?;
        let mapping = Mapping::shared(&file, PROPERTIES_BYTES, false)
            .map_err(|source| map_error(&directory, &path, source))?;
        // The capabilities are constant.
        let cap = u64::from(read(&mapping, offset::CAP))
            | u64::from(read(&mapping, offset::CAP + 4)) << 32;
        let capabilities = Capabilities::decode(cap, read(&mapping, offset::PMRCAP))
            .map_err(|source| drive_error(&directory, source))?;
        Ok(Self { mapping, directory, capabilities })
    }

    /// The file that maps the region.
    fn region_file(&self) -> Result<(PathBuf, File), OpenError> {
        let path = self.directory.join(format!("resource{}", self.capabilities.bar));
        let file = open_bar(&path)?;
        Ok((path, file))
    }

    /// Enables the region, and waits until it is ready. Returns whether it has the content of before
    /// the last power cycle.
    fn enable(&self) -> Result<bool, OpenError> {
        let began = Instant::now();
        let mut enabling = Enabling::new(self.capabilities);
        let mut is_logged = false;
        loop {
            let pmrsts = self.read(offset::PMRSTS);
            let pmrctl = self.read(offset::PMRCTL);
            let now_ms = began.elapsed().as_millis() as u64;
            match enabling.step(pmrsts, pmrctl, now_ms).map_err(|source| self.error(source))? {
                Step::Enable => self.write(offset::PMRCTL, PMRCTL_ENABLE),
                Step::Wait => {
                    if !is_logged && began.elapsed() > READY_QUIET {
                        tracing::warn!(
                            drive = %self.directory.display(),
                            "waiting for the drive's Persistent Memory Region: the drive asks for up to \
                             {} s",
                            self.capabilities.ready_ms.div_ceil(1000)
                        );
                        is_logged = true;
                    }
                    std::thread::sleep(READY_PAUSE);
                }
                Step::Ready { is_restored } => return Ok(is_restored),
            }
        }
    }

    fn read(&self, offset: usize) -> u32 {
        read(&self.mapping, offset)
    }

    fn write(&self, offset: usize, value: u32) {
        debug_assert!(offset.is_multiple_of(4) && offset < PROPERTIES_BYTES);
        // SAFETY: an aligned property inside the mapping. Only the process that has the region locked
        // writes it.
        unsafe { self.mapping.start().add(offset).cast::<u32>().write_volatile(value.to_le()) }
    }

    /// Waits until all stores to the region are persistent ([`pmr::fence`]).
    #[inline]
    pub(super) fn fence(&self, region: &Mapping) -> Result<(), RegionError> {
        let device = MappedDevice { properties: self, region };
        let fenced = pmr::fence(&device, self.capabilities.barrier);
        match fenced {
            Ok(()) if !region.has_faulted() && !self.mapping.has_faulted() => Ok(()),
            Ok(()) => Err(self.region_error(Fault::Gone)),
            Err(fault) => Err(self.region_error(fault)),
        }
    }

    /// Checks that what was read from the region so far is its content.
    pub(super) fn check(&self, region: &Mapping) -> Result<(), Fault> {
        // The drive is asked in the same way.
        pmr::fence(&MappedDevice { properties: self, region }, Barrier::Status)?;
        match region.has_faulted() || self.mapping.has_faulted() {
            true => Err(Fault::Gone),
            false => Ok(()),
        }
    }

    #[cold]
    pub(super) fn region_error(&self, fault: Fault) -> RegionError {
        RegionError::new(format!("{}: {fault}", self.directory.display()))
    }

    fn error(&self, source: PmrError) -> OpenError {
        drive_error(&self.directory, source)
    }

    fn map_error(&self, path: &Path, source: io::Error) -> OpenError {
        map_error(&self.directory, path, source)
    }

    /// Number of the BAR with the region.
    pub(super) fn bar(&self) -> u8 {
        self.capabilities.bar
    }

    /// The read by which a fence makes stores durable, for display.
    pub(super) fn describe_fence(&self) -> &'static str {
        match self.capabilities.barrier {
            Barrier::Status => "a read of PMRSTS with each fence",
            Barrier::Memory => "a read of the region and of PMRSTS with each fence",
        }
    }
}

/// Reads a property.
fn read(mapping: &Mapping, offset: usize) -> u32 {
    debug_assert!(offset.is_multiple_of(4) && offset < PROPERTIES_BYTES);
    // SAFETY: an aligned property inside the mapping. The load is volatile, since the drive changes it.
    u32::from_le(unsafe { mapping.start().add(offset).cast::<u32>().read_volatile() })
}

/// A region with its drive's properties.
struct MappedDevice<'a> {
    properties: &'a Properties,
    region: &'a Mapping,
}

impl Device for MappedDevice<'_> {
    #[inline]
    fn order_stores(&self) {
        #[cfg(target_arch = "x86_64")]
        crate::persist::fence();
    }

    #[inline]
    fn property(&self, offset: usize) -> u32 {
        self.properties.read(offset)
    }

    #[inline]
    fn read_memory(&self) {
        let _ = load(self.region, 0);
    }
}

/// Lets the device answer reads and writes of its memory. It does so already if a driver of the
/// kernel has it.
fn switch_on(directory: &Path) -> Result<(), OpenError> {
    let path = directory.join("enable");
    let state = std::fs::read_to_string(&path).map_err(os(&path, "read it"))?;
    // The file counts the users of the device, and the end of a program lowers no count.
    if state.trim() == "0" {
        std::fs::write(&path, "1").map_err(os(&path, "switch the device on"))?;
    }
    Ok(())
}

fn open_bar(path: &Path) -> Result<File, OpenError> {
    OpenOptions::new().read(true).write(true).open(path).map_err(os(path, "open it"))
}

/// Size of a region in bytes, in whole blocks.
fn region_len(path: &Path, file: &File) -> Result<usize, OpenError> {
    let bytes = file.metadata().map_err(os(path, "inspect it"))?.len();
    let len = usize::try_from(bytes).unwrap_or(usize::MAX) / BLOCK_BYTES * BLOCK_BYTES;
    if len == 0 {
        let problem = format!("the drive's memory has {bytes} bytes, which is not a single block");
        return Err(OpenError::Size { path: path.display().to_string(), problem });
    }
    Ok(len)
}

fn os(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.display().to_string();
    move |source| OpenError::Os { path, doing, source }
}

/// The error of mapping a BAR. The kernel refuses that to all but the driver that has the device,
/// unless its command line has `iomem=relaxed`. In lockdown mode it refuses that to all programs.
fn map_error(directory: &Path, path: &Path, source: io::Error) -> OpenError {
    let driver = std::fs::read_link(directory.join("driver"));
    let driver = driver.ok().and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
    let why = match (source.raw_os_error(), driver) {
        (Some(libc::EPERM), _) => {
            "The kernel is in lockdown mode, as with Secure Boot, and then no \
             program may map a device's memory: use another kind of log, or switch Secure Boot off"
                .to_owned()
        }
        (Some(libc::EINVAL), Some(driver)) => {
            let address = directory.file_name().unwrap_or_default().to_string_lossy();
            format!(
                "The kernel's driver {driver} has the drive, and then the kernel lets no program map \
                 its memory. Either start the kernel with iomem=relaxed on its command line, or take \
                 the drive from the driver, which ends its namespaces here: echo {address} > \
                 /sys/bus/pci/drivers/{driver}/unbind"
            )
        }
        _ => return os(path, "map it")(source),
    };
    let problem = format!("can't map it: {source}. {why}");
    OpenError::Kind { path: path.display().to_string(), problem }
}

fn drive_error(directory: &Path, source: PmrError) -> OpenError {
    let path = directory.display().to_string();
    let advice = match &source {
        PmrError::Unsupported => {
            ": use another kind of log, such as block: on a small drive with power-loss protection"
                .to_owned()
        }
        PmrError::Fault(Fault::Error(_)) => {
            format!(": echo 1 > {path}/reset, while no program uses the drive")
        }
        PmrError::Fault(Fault::Health(_)) => {
            ": put the log elsewhere, and give this one up (accept_lost_log), or replace the drive"
                .to_owned()
        }
        _ => String::new(),
    };
    OpenError::DriveMemory { path, source, advice }
}

#[cfg(test)]
mod tests;

//! Volumes: creating, inspecting, listing, deleting, opening and closing them.

use std::ffi::{c_char, c_int};
use std::ptr;

use riopipe::{MemberAddr, NotClosed, Volume};

use crate::error::{RiopError, guard};
use crate::failure::Failure;
use crate::handle::{self, Handle, kind};
use crate::info::RiopVolumeInfo;
use crate::memory::{self, array, array_mut, place, put, text};
use crate::options::{self, RiopConnectOptions, RiopCreateOptions, RiopOpenOptions};
use crate::recovery::{self, RiopRecovery, RiopWritten};
use crate::text::put_json;
use crate::time::limit;

/// See `riop_volume` in `riopipe.h`.
pub type RiopVolume = Handle<Volume>;

kind!(Volume, b"riop-vol", "riop_volume");

/// The members of a call.
///
/// # Safety
/// See the [rules](crate#safety).
unsafe fn members(members: *const *const c_char, count: usize) -> Result<Vec<MemberAddr>, Failure> {
    // SAFETY: the caller keeps the rules.
    let members = unsafe { array(members, count, "members") }?;
    if members.is_empty() {
        return Err(memory::argument("there are no members: name at least one".into()));
    }
    let parsed = members.iter().map(|member| {
        // SAFETY: as above.
        let text = unsafe { text(*member, "a member") }?;
        Ok(text.parse::<MemberAddr>()?)
    });
    parsed.collect()
}

/// Creates a volume.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_create(
    name: *const c_char,
    members: *const *const c_char,
    member_count: usize,
    options: *const RiopCreateOptions,
    info: *mut RiopVolumeInfo,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let name = text(name, "name")?;
            let members = self::members(members, member_count)?;
            let options = options::create(options)?;
            if !info.is_null() {
                memory::check_results(info)?;
            }
            let created = Volume::create(name, &members, &options)?;
            match info.is_null() {
                true => Ok(()),
                false => memory::write(info, &(&created).into()),
            }
        })
    }
}

/// Reads the properties of a volume.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_inspect(
    members: *const *const c_char,
    member_count: usize,
    options: *const RiopConnectOptions,
    info: *mut RiopVolumeInfo,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let members = self::members(members, member_count)?;
            let connect = options::connect(options)?;
            memory::check_results(info)?;
            let inspected = Volume::inspect(&members, &connect)?;
            memory::write(info, &(&inspected).into())
        })
    }
}

/// Lists the volumes of targets, as JSON.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_list_json(
    members: *const *const c_char,
    member_count: usize,
    options: *const RiopConnectOptions,
    json: *mut *mut c_char,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let members = self::members(members, member_count)?;
            let connect = options::connect(options)?;
            place(json, "json")?;
            let list = Volume::list(&members, &connect)?;
            put_json(json, &list)
        })
    }
}

/// Deletes a volume with all its data.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_delete(
    name: *const c_char,
    members: *const *const c_char,
    member_count: usize,
    force: c_int,
    options: *const RiopConnectOptions,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let name = text(name, "name")?;
            let members = self::members(members, member_count)?;
            let connect = options::connect(options)?;
            Volume::delete(name, &members, force != 0, &connect)?;
            Ok(())
        })
    }
}

/// Opens a volume, and recovers it first after a crash.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_open(
    name: *const c_char,
    members: *const *const c_char,
    member_count: usize,
    options: *const RiopOpenOptions,
    volume: *mut *mut RiopVolume,
    recovery: *mut *mut RiopRecovery,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let name = text(name, "name")?;
            let members = self::members(members, member_count)?;
            let options = options::open(options)?;
            let volume = place(volume, "volume")?;
            let (opened, found) = Volume::open(name, &members, &options)?;
            if !recovery.is_null() {
                put(recovery, recovery::new(found));
            }
            put(volume, handle::new(opened));
            Ok(())
        })
    }
}

/// Reads the properties of an open volume, as they were when it was opened.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_get_info(
    volume: *const RiopVolume,
    info: *mut RiopVolumeInfo,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            memory::write(info, &volume.info().into())
        })
    }
}

/// The figures of an open volume, as JSON.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_stat_json(
    volume: *const RiopVolume,
    json: *mut *mut c_char,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            put_json(json, &volume.stat())
        })
    }
}

/// The writes of a stream that wait to be acknowledged.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_pending(
    volume: *const RiopVolume,
    id: u16,
    written: *mut RiopWritten,
    capacity: usize,
    count: *mut usize,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            let count = place(count, "count")?;
            // Each place is written below before it is counted, and not read.
            let places = array_mut(written, capacity, "written")?;
            let pending = volume.in_place(id);
            for (place, found) in places.iter_mut().zip(&pending) {
                *place = (*found).into();
            }
            put(count, pending.len());
            Ok(())
        })
    }
}

/// Acknowledges these writes.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_acknowledge(
    volume: *const RiopVolume,
    id: u16,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let volume = handle::shared(volume)?;
            Ok(volume.acknowledge(id)?)
        })
    }
}

/// Releases a volume on its targets, and frees it.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_close(
    volume: *mut RiopVolume,
    timeout_ms: i64,
    error: *mut *mut RiopError,
) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe {
        guard(error, || {
            let close = |volume: Volume| {
                let closed = match limit(timeout_ms) {
                    Some(timeout) => volume.close_within(timeout),
                    None => volume.close(),
                };
                closed.map_err(|NotClosed { error, back }| Box::new((back, error.into())))
            };
            handle::consume(volume, close)
        })
    }
}

/// Frees a volume without releasing it.
///
/// # Safety
/// See the [rules](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn riop_volume_free(volume: *mut RiopVolume) -> c_int {
    // SAFETY: the caller keeps the rules.
    unsafe { guard(ptr::null_mut(), || handle::free(volume)) }
}
